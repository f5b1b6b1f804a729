"""Records the lines of a Python process that a recorded test has started; see `tests/helpers/covered.py`."""

import os
import sys

# Processes that fork from a server record by themselves.
is_server = any("multiprocessing.forkserver" in word for word in sys.orig_argv)
if not is_server and "MEGATRON_LITE_RECORD_LINES" in os.environ and "PYTEST_CURRENT_TEST" in os.environ:
    import atexit
    import contextlib

    import coverage

    package = os.path.join(os.path.dirname(__file__), *[os.pardir] * 3, "megatron_lite")
    recorder = coverage.Coverage(
        data_file=os.path.join(os.environ["MEGATRON_LITE_RECORD_LINES"], "lines"),
        data_suffix=True,
        source=[os.path.abspath(package)],
        config_file=False,
        context=os.environ["PYTEST_CURRENT_TEST"],
    )
    recorder.set_option("run:disable_warnings", ["no-data-collected"])  # tests compare the error output
    recorder.start()

    def save() -> None:
        with contextlib.suppress(Exception):  # a full disk is the subject of a test
            recorder.stop()
            recorder.save()

    atexit.register(save)
