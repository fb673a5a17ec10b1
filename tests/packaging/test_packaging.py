"""What a fresh machine relies on: metadata, package data, and the scripts behind `make`."""

import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata

import pytest

from ikbo_jax._version import __version__

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the scripts are for POSIX shells")


def test_installed_version_is_the_one_in_the_source():
    try:
        installed = metadata.version("ikbo-jax")
    except metadata.PackageNotFoundError:
        pytest.skip("run from the source tree without an installation")
    assert installed == __version__


def test_changelog_has_the_version_or_unreleased():
    """The newest release that it lists is the version; a project without one has `Unreleased`."""
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    first, *others = re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    releases = others if first == "Unreleased" else [first, *others]
    assert "Unreleased" not in releases
    assert releases[:1] in ([], [__version__])
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


def anchors(page):
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", words).lower().replace(" ", "-") for words in headings}


def test_links_in_the_documents_lead_somewhere():
    links = [
        (document, *re.match(r"([^#]*)#?(.*)", target).groups())
        for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
        for target in re.findall(r"\]\(([^)]+)\)", document.read_text("utf-8"))
        if "://" not in target
    ]
    assert len({document for document, *_ in links}) > 5
    broken = []
    for document, target, anchor in links:
        page = document.parent / target if target else document
        if not page.exists() or (anchor and anchor not in anchors(page)):
            broken.append(f"{document.name}: {target}#{anchor}")
    assert not broken


def test_every_import_is_declared():
    """The library imports jax, numpy and declared packages; extras where they are asked for."""
    declared = {re.match(r"[\w-]+", entry)[0] for entry in PROJECT["dependencies"]} | {"jaxlib"}
    for path in sorted((ROOT / "ikbo_jax").rglob("*.py")):
        allowed = declared | ({"flax", "keras"} if "layers" in path.parts else set())
        # For a plot alone: the command says which extra brings it.
        allowed |= {"matplotlib"} if path.name == "demo_ranking.py" else set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            else:
                continue
            for name in names:
                top = name.split(".")[0]
                known = top in sys.stdlib_module_names or top == "ikbo_jax" or top in allowed
                assert known, f"{path.relative_to(ROOT)} imports {name}, which is not declared"


@pytest.mark.slow
def test_wheel_holds_the_package_and_its_data(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(
        ROOT / "ikbo_jax", source / "ikbo_jax", ignore=shutil.ignore_patterns("__pycache__")
    )
    (source / "tests").mkdir()
    (source / "tests" / "__init__.py").touch()
    # What pip calls; pip itself would take twice as long.
    build = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", build, tmp_path]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("ikbo_jax-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"ikbo_jax-{__version__}.dist-info"
        text = archive.read(f"{info}/METADATA").decode()
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    sources = {p.relative_to(source).as_posix() for p in (source / "ikbo_jax").rglob("*.py")}
    assert sources | {"ikbo_jax/py.typed", "ikbo_jax/tuning/sm90.json"} <= names
    assert not any(name.startswith(("tests", "benchmarks")) for name in names)
    assert f"{info}/licenses/LICENSE" in names
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.12" in text
    for extra in ("cuda12", "cuda13", "flax", "bench", "serve", "test"):
        assert f"Provides-Extra: {extra}" in text
    assert "ikbo-jax = ikbo_jax.cli:main" in entry_points
    # The first page, for readers who see nothing of the repository beside it.
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 20
    assert all(link.startswith("https://") for link in links)
    source = PROJECT["urls"]["Source"]
    assert f"]({source}/raw/main/docs/images/ikbo.svg)" in text
    assert f"]({source}/blob/main/docs/adopting.md#a-new-model)" in text
    assert f"Project-URL: Source, {source}" in text
    assert "Author: " in text


# --- the scripts ----------------------------------------------------------------------------------

TOOLS = "bash cat cksum cp date dirname grep ls mkdir mktemp rm sort tee timeout"


class Machine:
    """A PATH with the tools a shell script needs and no Python but those that a test puts there."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir()
        for tool in TOOLS.split():
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.env = {
            "PATH": str(self.bin),
            "HOME": str(root),
            "PYENV_ROOT": str(root / "pyenv"),
            "TMPDIR": str(root),
        }

    def script(self, path: pathlib.Path, body: str) -> pathlib.Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{self.bin}/bash\n{body}\n")
        path.chmod(0o755)
        return path

    def python(self, path: str) -> pathlib.Path:
        """Puts the interpreter that runs this test under another name."""
        return self.script(self.root / path, f'exec "{sys.executable}" "$@"')

    def shim(self, path: str) -> None:
        """Puts a name there that exists and does not run, as pyenv does."""
        self.script(self.root / path, 'echo "pyenv: command not found" >&2; exit 127')

    def run(self, *command: object, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(part) for part in command],
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
        )


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


FIND = ROOT / "tools" / "find_python.sh"


@pytest.mark.parametrize(
    "path", ["bin/python3.12", "pyenv/versions/3.12.9/bin/python3", "elsewhere/python3"]
)
def test_find_python_passes_over_shims_that_do_not_run(machine, path):
    """After the names on PATH, it looks at what pyenv has installed, and asks uv last."""
    for shim in ("bin/python3.13", "bin/python3", "pyenv/versions/3.13.0/bin/python3"):
        machine.shim(shim)
    python = machine.python(path)
    if path.startswith("elsewhere"):
        machine.script(machine.bin / "uv", f'[ "$1 $2" = "python find" ] && echo "{python}"')
    result = machine.run(FIND)
    assert (result.returncode, result.stdout.strip()) == (0, sys.executable), result.stderr


def test_find_python_names_everything_it_tried(machine):
    machine.shim("bin/python3.13")
    machine.python("bin/python3")
    result = machine.run(FIND, "--min", "3.99", "--no-download")
    assert result.returncode == 1
    assert result.stdout == ""
    assert "no usable Python >= 3.99" in result.stderr
    assert re.search(r"python3\.13 \(.*\): pyenv: command not found", result.stderr)
    assert "python3.12: not found" in result.stderr
    assert re.search(r"python3 \(.*\): is Python 3\.\d+, too old", result.stderr)
    assert "pyenv: no versions under" in result.stderr
    assert "uv: not found" in result.stderr


def test_find_python_takes_no_other_than_the_named_one(machine):
    machine.python("bin/python3.12")
    result = machine.run(FIND, PYTHON="/no/such/python")
    assert result.returncode == 1
    assert "PYTHON=/no/such/python will not do" in result.stderr


@pytest.fixture
def tree(machine) -> pathlib.Path:
    """A copy of the scripts beside a `python3.13` that only pretends to make environments."""
    tree = machine.root / "tree"
    shutil.copytree(ROOT / "tools", tree / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / ".ci", tree / ".ci")
    (tree / "tests").mkdir()
    for name in ("pyproject.toml", "tests/shares.txt"):
        shutil.copy(ROOT / name, tree / name)
    inner = machine.script(
        machine.root / "environment_python",
        'case "$*" in '
        '"-m pip config list") echo "$PIP_CONFIG" ;; '
        # uv's wheel, if this machine has one.
        f'*" uv") [ -n "$UV" ] && mkdir -p "$(dirname "$0")/../.uv/bin" && '
        f'cp "{machine.root}/uv" "$(dirname "$0")/../.uv/bin/uv" ;; '
        f'"-m pip "*) echo "$*" >>"{machine.root}/pip.log"; '
        '[ -z "${PIP_FAILS:-}" ] && [[ -z "${UPGRADE_FAILS:-}" || "$*" != *--upgrade* ]] ;; esac',
    )
    machine.script(
        machine.bin / "python3.13",
        f'if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin" && cp "{inner}" "$3/bin/python" '
        f'&& echo >"$3/pyvenv.cfg"; else exec "{sys.executable}" "$@"; fi',
    )
    machine.script(machine.root / "uv", f'echo "$*" >>"{machine.root}/uv.log"; [ "$UV" = "works" ]')
    # The search ends at the interpreter's own name for itself, so name the pretender outright.
    machine.script(tree / "tools" / "find_python.sh", f'echo "{machine.bin}/python3.13"')
    return tree


def _log(machine: Machine, name: str = "pip") -> list[str]:
    log = machine.root / f"{name}.log"
    return log.read_text().splitlines() if log.exists() else []


def test_setup_installs_once_and_again_after_a_failure_or_a_change_of_pyproject(machine, tree):
    setup = tree / "tools" / "setup_venv.sh"
    result = machine.run(setup, ".venv", PIP_FAILS="1")
    assert result.returncode == 1
    assert "pip could not install ikbo-jax" in result.stderr
    assert len(_log(machine)) == 1
    assert machine.run(setup, ".venv", "test").returncode == 0
    assert len(_log(machine)) == 2
    assert "--constraint tools/constraints.txt" in _log(machine)[1]
    assert _log(machine)[1].endswith("--editable .[test]")
    assert machine.run(setup, ".venv", "test").returncode == 0
    assert machine.run(setup, ".venv").returncode == 0
    assert len(_log(machine)) == 2
    assert machine.run(setup, ".venv", "test", "offline").returncode == 0
    assert len(_log(machine)) == 3
    with (tree / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert machine.run(setup, ".venv").returncode == 0
    assert len(_log(machine)) == 4


def test_setup_installs_with_uv(machine, tree):
    setup = tree / "tools" / "setup_venv.sh"
    assert machine.run(setup, ".venv", "test", UV="works").returncode == 0
    (line,) = _log(machine, "uv")
    assert "--constraint tools/constraints.txt" in line
    assert "--python .venv/bin/python" in line
    assert "--upgrade" not in line
    assert line.endswith("--editable .[test]")
    # Installed already.
    assert machine.run(setup, ".venv", "test", UV="works").returncode == 0
    assert len(_log(machine, "uv")) == 1
    environment = {"UPGRADE": "1", "CONSTRAINTS": "", "UV": "works"}
    assert machine.run(setup, ".venv", "test", **environment).returncode == 0
    assert "--upgrade" in _log(machine, "uv")[1]
    assert "--constraint" not in _log(machine, "uv")[1]
    assert _log(machine) == []
    # Where uv fails, pip installs.
    assert machine.run(setup, ".venv2", "test", UV="fails").returncode == 0
    assert (len(_log(machine, "uv")), len(_log(machine))) == (3, 1)


@pytest.mark.parametrize("setting", ["global.index-url", ":env:.index-url", "install.no-index"])
def test_setup_leaves_an_index_of_pips_settings_to_pip(machine, tree, setting):
    setup = tree / "tools" / "setup_venv.sh"
    config = f"global.timeout='60'\n{setting}='here'"
    assert machine.run(setup, ".venv", "test", UV="works", PIP_CONFIG=config).returncode == 0
    assert _log(machine, "uv") == []
    assert len(_log(machine)) == 1
    config = "global.extra-index-url='here'"
    assert machine.run(setup, ".venv2", UV="works", PIP_CONFIG=config).returncode == 0
    assert len(_log(machine, "uv")) == 1


def test_setup_makes_a_broken_environment_afresh(machine, tree):
    setup = tree / "tools" / "setup_venv.sh"
    machine.shim("tree/.venv/bin/python")
    (tree / ".venv" / "pyvenv.cfg").touch()
    result = machine.run(setup, ".venv")
    assert result.returncode == 0, result.stderr
    assert "no longer runs" in result.stderr
    assert len(_log(machine)) == 1


def test_setup_leaves_other_directories_alone(machine, tree):
    precious = tree / "data" / "precious"
    precious.parent.mkdir()
    precious.touch()
    result = machine.run(tree / "tools" / "setup_venv.sh", "data")
    assert result.returncode == 1
    assert "data is not a virtual environment" in result.stderr
    assert precious.exists()


@pytest.mark.parametrize(
    ("failing", "upgrade_fails", "said"),
    [
        ("test", "", "make test"),
        ("lint", "", "make lint"),
        ("", "1", "pip could not install ikbo-jax[test,offline]"),
    ],
)
def test_ci_fails_when_a_step_fails(machine, tree, failing, upgrade_fails, said):
    machine.script(machine.bin / "make", f'echo "make $*"; [ "$1" != "{failing}" ]')
    result = machine.run(tree / ".ci" / "run", UPGRADE_FAILS=upgrade_fails)
    assert result.returncode != 0
    assert said in result.stdout
    assert failing or "make lint" in result.stdout
    assert "== passed" not in result.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_make_with_py_installs_nothing():
    result = subprocess.run(
        ["make", "-n", "-C", ROOT, "test", f"PY={sys.executable}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "setup_venv" not in result.stdout
    assert f"{sys.executable} -m pytest" in result.stdout
