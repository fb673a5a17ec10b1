"""Records the lines that a test's own Python processes run; Python imports it when it starts."""

import os

if "LINES_OF_TESTS" in os.environ and (test := os.environ.get("PYTEST_CURRENT_TEST")):
    import lines_of_tests

    lines_of_tests.record_until_exit(test.rsplit(" (", 1)[0])
