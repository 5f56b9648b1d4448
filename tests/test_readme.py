"""What README.md and docs/ say of the repository is true: its map, files, commands, keys, metrics and links."""
import ast
import glob
import os
import re
import shlex
import sys

import pytest

from conftest import ROOT

import tiny
from configurator import read_arguments, read_keys
from tiny import forked, one_run
from tools.memory import read_run


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


def files(*patterns):
    """The repository's files of these patterns, by their path from its root."""
    return sorted(os.path.relpath(p, ROOT) for pattern in patterns for p in glob.glob(os.path.join(ROOT, pattern)))


PAGES = {path: read(path) for path in files("*.md", "docs/*.md", "engine/*.md")}
HOUSE = files("*.py", "engine/*.py", "tools/*.py")
ROW = re.compile(r"^\| (?:`([\w/]+\.py)`|\*\*engine/\*\*) \|", re.MULTILINE)
# the front page's rows, and those of engine/README.md where it says engine/
MAP = [path for row in ROW.findall(PAGES["README.md"]) for path in ([row] if row else ROW.findall(PAGES["engine/README.md"]))]
SOURCE = "\n".join(map(read, files("*.py", "engine/*.py", "tools/*.py", "config/*.py", "data/*.py", "data/*/*.py", "tests/*.py",
                                   "runs/*.sh", "runs/peers/*.py")))


# ---------------------------------------------------------------------------------------------------------------------
# the front page and its map


def test_the_front_page_is_short():
    assert len(PAGES["README.md"].splitlines()) <= 150


def test_every_page_can_be_reached_from_the_front_page():
    linked = set(re.findall(r"\]\((\w+/\w+\.md)\)", PAGES["README.md"]))
    assert linked == PAGES.keys() - {"README.md"}


def test_the_map_names_every_file_once():
    assert sorted(MAP) == HOUSE


def imports_of(path):
    """The files of the house that a file imports, wherever in it the import stands."""
    names = []
    for node in ast.walk(ast.parse(read(path))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
    paths = [name.replace(".", "/") for name in names]
    return {file for p in paths for file in (f"{p}.py", f"{p}/__init__.py") if file in HOUSE}


def test_imports_are_found():
    assert {"engine/__init__.py", "engine/answers.py", "data.py"} <= imports_of("rewards.py")
    assert "loss.py" in imports_of("ppo.py") and not imports_of("gae.py")


def test_imports_only_point_down_the_map():
    for number, path in enumerate(MAP):
        # engine/__init__.py imports nothing; whatever imports a file of engine/ imports it, too
        for other in imports_of(path):
            assert MAP.index(other) > number, f"{path} imports {other}, which is not below it in the map"


def test_nothing_imports_the_scripts_or_the_tools():
    top = {"ppo.py", "grpo.py", "sft.py", "rm.py", *files("tools/*.py")} - {"tools/dry_run.py"}  # a part of tools/memory.py
    for path in HOUSE:
        assert not imports_of(path) & top, path


def test_lines_have_at_most_100_columns():
    """Those of Python and of the shell, outside tests/: ruff.toml says so as well, but ruff does not read shell scripts."""
    checked = files(".ci/run", *(f"{folder}*.{kind}" for kind in ("py", "sh") for folder in
                                 ("", "config/", "data/", "data/*/", "engine/", "runs/", "runs/*/", "tools/")))
    assert {"ppo.py", "data/code/prepare.py", "runs/gpu.sh", "runs/peers/table.py"} <= {*checked}
    assert not [f"{path}:{number}: {line}" for path in checked
                for number, line in enumerate(read(path).splitlines(), 1) if len(line) > 100]


# ---------------------------------------------------------------------------------------------------------------------
# files and links


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    named = re.findall(r"(?:config|data|runs|tests|assets|engine|tools|docs)/[\w/.]*\.(?:py|sh|png|md)", PAGES[page])
    named += re.findall(r"`(\w+\.(?:py|txt))`", PAGES[page])
    assert named
    for path in set(named):
        if "mine" not in path:  # the reader's own
            assert os.path.exists(os.path.join(ROOT, path)), path


def anchors(page):
    """What the headings of a page are called in links, as GitHub does it."""
    headings = re.findall(r"^#+ (.*)$", PAGES[page], re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        path, _, anchor = link.partition("#")
        target = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        assert os.path.exists(os.path.join(ROOT, target)), link
        assert not anchor or anchor in anchors(target), link


# ---------------------------------------------------------------------------------------------------------------------
# commands and keys

COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:python|torchrun|bash) \S.*")


def commands(text):
    """The words of each command of a page: of its indented blocks and of those between backticks that are whole commands."""
    found = re.findall(r"^    (\S.*)$", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
    parts = [part.strip() for command in found for part in command.split("&&")]
    return [shlex.split(part, comments=True) for part in parts if COMMAND.fullmatch(part)]


def script_of(words):
    """(the script or shell script that a command runs, its arguments)."""
    place = next((i for i, word in enumerate(words) if i and word.endswith((".py", ".sh"))), None)
    return (words[place], words[place + 1:]) if place else (None, None)


def check_command(words):
    """Raise, unless the script of a command exists and takes these arguments."""
    script, arguments = script_of(words)
    assert script, f"no script in {words}"
    source = read(script)  # which must be there
    if script.endswith(".sh") or arguments == ["--help"]:
        return
    if script == "tools/memory.py":  # the configurations of others, and options of its own
        options = ("--world-size=", "--gpu-gb=", "--compare")
        read_run([argument for argument in arguments if not argument.startswith(options)])
    elif "configure(globals()" in source:
        read_arguments(read_keys(script), arguments)
    else:
        options = set(re.findall(r"add_argument\(\"(--[\w-]+)\"", source))
        for argument in arguments:
            assert argument.partition("=")[0] in options, f"{script} does not take {argument}"


@pytest.fixture(autouse=True)
def at_home(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # configure sets it


COMMANDS = {" ".join(words): words for text in PAGES.values() for words in commands(text)
            if len(words) > 1 and not words[1].startswith(("-m", "--")) or "torchrun" in words[0] and script_of(words)[0]}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_commands_name_scripts_configs_and_keys(command):
    check_command(COMMANDS[command])


def test_commands_are_found_and_wrong_ones_refused():
    assert len(COMMANDS) > 25
    for wrong in ("python pppo.py", "python ppo.py config/none.py", "python ppo.py --rewards=code", "python grpo.py --scale_by=2",
                  "python data/tldr/prepare.py --chatty"):
        (words,) = commands(f"    {wrong}\n")
        with pytest.raises((AssertionError, OSError, ValueError)):
            check_command(words)


def keys_of(path):
    """The keys or options of a file, if it is a script."""
    source = read(path)
    if "configure(globals()" in source:
        return read_keys(path).keys()
    return {option.replace("-", "_") for option in re.findall(r"add_argument\(\"--([\w-]+)\"", source)}


KEYS = set().union(*map(keys_of, files("*.py", "tools/*.py", "data/*.py", "data/*/*.py", "tests/*.py", "runs/*.py",
                                       "runs/peers/*.py")))
OTHERS = {"key", "help", "index_url", "max_restarts", "shutdown_timeout", "nproc_per_node", "nnodes", "rdzv_backend",
          "rdzv_endpoint", "rdzv_id", "rdzv_conf", "local_dir", "repo_type"}  # of pip, torchrun and hf
OTHERS |= {"job_name", "nodes", "ntasks_per_node", "gpus_per_node", "cpus_per_task", "time", "signal", "requeue", "open_mode"}
OTHERS |= {"world_size", "gpu_gb", "compare"}  # of tools/memory.py
OTHERS |= {"build_arg", "rm", "gpus", "shm_size", "network", "privileged"}  # of SLURM, and of docker


@pytest.mark.parametrize("page", PAGES)
def test_options_that_a_page_names_exist(page):
    text = PAGES[page]
    for option in re.findall(r"--([a-z][\w-]*)", text):
        assert option.replace("-", "_") in KEYS | OTHERS, f"--{option}"
    for key in re.findall(r"`([a-z_]+) ?= ?[^`]*`", text):
        assert key in KEYS, f"{key} = ..."


@pytest.mark.parametrize("page", PAGES)
def test_names_that_a_page_quotes_stand_in_the_source(page):
    for name in re.findall(r"`([A-Za-z]\w*_\w+)`", PAGES[page]):
        assert re.search(rf"\b{name}\b", SOURCE), name


# ---------------------------------------------------------------------------------------------------------------------
# metrics

ROW = re.compile(r"^\| (`[a-z_]+/.*?) \| ([a-z, ]+) \|", re.MULTILINE)


def documented():
    """{script: the metrics that docs/metrics.md says it logs}; `objective/reward/...` is every metric that begins so."""
    table = {}
    for keys, scripts in ROW.findall(PAGES["docs/metrics.md"]):
        for script in ("ppo", "grpo", "sft", "rm") if scripts == "all" else scripts.split(", "):
            table.setdefault(script, set()).update(re.findall(r"`([^`]+)`", keys))
    return table


def metrics_of(record):
    """The names of what is logged, as the page names them: what is evaluated, or trained on, is named as it is sampled."""
    names = set()
    for key in record.keys() - {"iteration"}:
        group, _, rest = key.partition("/")
        name = key if group not in ("eval", "trained") or key in ("eval/loss",) else f"objective/{rest}"
        names.add("objective/reward/..." if name.startswith("objective/reward/") else name)
    return names


# what a reward of the reader's own is given, as docs/rewards.md says
TABLE = PAGES["docs/rewards.md"].partition("| key | what it is |\n")[2].partition("\n\n")[0]
GIVEN = [name for line in TABLE.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])]


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """{name of a run: its log}, of a small run of each script; of "alone", of grpo with a single reward."""
    folder = str(tmp_path_factory.mktemp("logs"))
    world = tiny.build(folder)
    rewards = f"{world.rule('some')},0*{world.rule('odd')},0*reward_model"
    with open(os.path.join(folder, "seen.py"), "w", encoding="utf-8") as f:  # fails unless it is given what is promised
        f.write(f"def seen(batch):\n    return [len([batch[key] for key in {GIVEN}])] * len(batch['completions'])\n")
    peak = dict(max_iters=1)
    both = peak | dict(reward_functions=rewards, importance_cap=2, roles="train=1,generate=1,score=1",
                       staleness=1)
    runs = dict(ppo=world.ppo("out", value_init="policy", ptx_path=world.texts, **both),
                grpo=world.grpo("out", max_refills=1, **both),
                sft=world.sft("out", **peak), rm=world.rm("out", **peak),
                taught=world.rm("out", teacher=world.second_reward, max_iters=1),
                ppo_one=world.ppo("out", value_init="policy", **peak),
                alone=world.grpo("out", reward_functions=f"{folder}/seen.py:seen", **peak))
    scripts = dict(alone="grpo.py", taught="rm.py", ppo_one="ppo.py")
    results = forked(folder, {name: [one_run(scripts.get(name, f"{name}.py"),
                                             *[arguments] * (3 if name in ("ppo", "grpo") else 1))]
                              for name, arguments in runs.items()})
    for (result,) in results.values():
        assert set(result["codes"]) == {0}, result["stderr"]
    return {name: tiny.read_log(os.path.join(folder, name, "out")) for name in runs}


@pytest.mark.parametrize("script", ["ppo", "grpo", "sft", "rm"])
def test_every_logged_metric_is_explained_and_no_other(script, logs):
    logged, explained = set().union(*map(metrics_of, logs[script])), documented()[script]
    if script == "rm":  # with a teacher it logs more; what it measures on held-out pairs has rows of its own
        logged = {key.replace("objective/", "eval/") for key in logged.union(*map(metrics_of, logs["taught"]))}
    if script in ("ppo", "grpo"):  # without roles a phase has a speed; and which phases there are may change
        logged = logged.union(*map(metrics_of, logs[dict(ppo="ppo_one", grpo="alone")[script]]))
        logged = {key for key in logged if not key.startswith("time/") or key in explained}
    assert logged == explained


def test_rewards_are_logged_one_by_one_where_there_are_several(logs):
    for script in ("ppo", "grpo"):  # odd has weight 0
        keys = set().union(*logs[script])
        assert {f"{group}/reward/{name}" for group in ("objective", "eval") for name in ("some", "odd")} <= keys
        first = logs[script][0]
        assert first["objective/scores"] == pytest.approx(first["objective/reward/some"])
    assert not any("/reward/" in key for record in logs["alone"] for key in record)


def test_a_reward_of_ones_own_is_given_what_the_page_says(logs):
    assert "completions" in GIVEN and "seconds" in GIVEN
    assert logs["alone"][0]["objective/scores"] == len(GIVEN)


# ---------------------------------------------------------------------------------------------------------------------
# nothing private


def test_nothing_private_is_in_the_repository():
    for path in files("*.py", "*.md", "docs/*.md", "engine/*.py", "tools/*.py", "config/*.py", "data/*.py", "data/*/*.py",
                      "runs/*.sh", "runs/peers/*.py"):
        assert not re.search(r"/(?:work|home|root|tmp)/", read(path)), path
