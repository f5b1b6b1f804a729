"""`python -m megatron_lite` is the command `megatron-lite`; torchrun starts its ranks this way."""

from megatron_lite.cli import main

if __name__ == "__main__":
    main()
