"""One case an op: random inputs, oracle, contenders and the error rule, for all who check or time.

The demo, the autotuner and the benchmarks use them; the tests have independent ones.
"""
