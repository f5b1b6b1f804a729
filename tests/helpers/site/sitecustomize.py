"""Records the lines of a Python process that a recorded test has started; see `tests/helpers/covered.py`."""

import os
import sys

if "MEGATRON_LITE_RECORD_LINES" in os.environ and "PYTEST_CURRENT_TEST" in os.environ:
    import atexit

    import coverage

    package = os.path.join(os.path.dirname(__file__), *[os.pardir] * 3, "megatron_lite")
    recorder = coverage.Coverage(
        data_file=os.path.join(os.environ["MEGATRON_LITE_RECORD_LINES"], "lines"),
        data_suffix=True,
        source=[os.path.abspath(package)],
        config_file=False,
        context=os.environ["PYTEST_CURRENT_TEST"],
    )
    recorder.start()
    atexit.register(lambda: (recorder.stop(), recorder.save()))
    sys.modules.pop("sitecustomize", None)
