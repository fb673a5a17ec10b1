"""The command `ikbo-jax tune`: arguments, messages and exit statuses."""

from __future__ import annotations

import pytest

from ikbo_jax import cli

SIZES = ["--m", "9", "--n", "8", "--k-cand", "7", "--k-user", "11"]
TUNE = ["tune", "linear-compression", "--b", "24", "--u", "5", *SIZES]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("abc", "'abc' is not a whole number"),
        ("1.5", "'1.5' is not a whole number"),
        ("", "'' is not a whole number"),
        ("-3", "-3 is not a positive number"),
        ("3000000000", "3000000000 is more than 2147483647"),
    ],
)
@pytest.mark.parametrize("command", ["demo", "tune"])
def test_a_size_that_is_none_is_named(capsys, command, value, reason):
    arguments = {"demo": ["demo"], "tune": TUNE}[command]
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*arguments, f"--m={value}"])
    assert exit_info.value.code == cli.UNUSABLE
    err = capsys.readouterr().err
    assert f"argument --m: {reason}" in err
    assert "_positive" not in err
