"""What README.md and docs/ say of the repository is true: its files, commands, keys, metrics and links; each command is run."""
import ast
import glob
import os
import re
import shlex
import shutil
import sys

import pytest

import tiny
from configurator import read_arguments, read_keys
from conftest import ROOT
from tiny import forked, in_a_row, one_run


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


def files(*patterns):
    """The repository's files of these patterns, by their path from its root."""
    return sorted(os.path.relpath(p, ROOT) for pattern in patterns for p in glob.glob(os.path.join(ROOT, pattern)))


PAGES = {path: read(path) for path in files("*.md", "docs/*.md", "options/*.md")}
HOUSE = files("*.py", "options/*.py", "grading/*.py", "tools/*.py")
SOURCE = "\n".join(map(read, [*HOUSE, *files("config/*.py", "data/*.py", "data/*/*.py", "tests/*.py", "runs/*.sh",
                                              "runs/peers/*.py")]))
pages = pytest.mark.parametrize("page", PAGES)


# ---------------------------------------------------------------------------------------------------------------------
# pages, files and links


def test_pages_are_reached_from_the_front_page_and_files_from_their_map():
    linked = set(re.findall(r"\]\((\w+/\w+\.md)\)", PAGES["README.md"]))
    assert linked == PAGES.keys() - {"README.md"} and len(PAGES["README.md"].splitlines()) <= 100
    assert set(files("*.py")) <= set(re.findall(r"`(\w+\.py)`", PAGES["README.md"]))
    in_order = re.findall(r"^\d\. `(\w+\.py)`", PAGES["README.md"], re.MULTILINE)  # as ppo.py imports them
    imported = [f"{name}.py" for name in re.findall(r"^(?:from|import) (\w+)", read("ppo.py"), re.MULTILINE)]
    assert in_order == ["ppo.py", *[name for name in imported if name in in_order]] and len(in_order) > 5
    listed = re.findall(r"^\| `([\w/]+\.py)` \|", PAGES["options/README.md"], re.MULTILINE)
    assert sorted(listed) == files("options/*.py", "grading/*.py")


def imports_of(path, inside=False):
    """The files of the house that a file imports at its top; or inside functions and under an if."""
    names, tree = [], ast.parse(read(path))
    for node in [n for n in ast.walk(tree) if n not in tree.body] if inside else tree.body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
    paths = [name.replace(".", "/") for name in names]
    return {file for p in paths for file in (f"{p}.py", f"{p}/__init__.py") if file in HOUSE}


def test_options_are_imported_where_their_key_is_read():
    """The core imports none at its top; an option imports the core, and of options only the one that it is made of."""
    core = [path for path in HOUSE if not path.startswith(("options/", "grading/", "tools/"))]
    for path in core:
        assert not [file for file in imports_of(path) if file.startswith(("options/", "grading/"))], path
        later = {"decoding_cache.py",  # it imports transformers, which takes seconds
                 "decoding_graph.py", "gpu.py"}  # on GPUs, where a copy without options/ runs, too
        assert not [file for file in imports_of(path, inside=True) - later
                    if not file.startswith(("options/", "grading/"))], path
    pairs = {(path, file) for path in files("options/*.py") for file in imports_of(path) if file.startswith("options/")}
    assert pairs == {("options/roles.py", "options/messages.py")}


def test_imports_only_point_down():
    """No circles; and nothing imports a script or a tool, but for parts of tools."""
    assert {"gae.py", "prompts.py"} <= imports_of("ppo.py") and not imports_of("gae.py")
    left = {path: imports_of(path) - {path} for path in HOUSE}
    parts = {f"tools/{name}.py" for name in ("curves", "dry_run", "figures", "output", "policies")}
    top = {"ppo.py", "grpo.py", "sft.py", "rm.py", *files("tools/*.py")} - parts
    assert not top & set().union(*left.values())
    while left:
        bottom = [path for path, imported in left.items() if not imported & left.keys()]
        assert bottom, f"these import one another: {sorted(left)}"
        for path in bottom:
            del left[path]


def anchors(page):
    """What the headings of a page are called in links, as GitHub does it."""
    headings = re.findall(r"^#+ (.*)$", PAGES[page], re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_links_and_files_of_a_page_are_there(page):
    folders = "config|data|runs|tests|assets|options|grading|recipes|tools|docs"
    named = re.findall(rf"(?:{folders})/[\w/.]*\.(?:py|sh|png|md|diff)", PAGES[page])
    for path in {*named, *re.findall(r"`(\w+\.(?:py|txt))`", PAGES[page])}:
        assert "mine" in path or os.path.exists(os.path.join(ROOT, path)), path  # but for the reader's own
    for link in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        path, _, anchor = link.partition("#")
        target = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        assert os.path.exists(os.path.join(ROOT, target)), link
        assert not anchor or anchor in anchors(target), link


def test_nothing_private_is_in_the_repository():
    for path in [*HOUSE, *PAGES, *files("config/*.py", "data/*.py", "data/*/*.py", "runs/*.sh", "runs/peers/*.py")]:
        assert not re.search(r"/(?:work|home|root|tmp)/", read(path)), path


# ---------------------------------------------------------------------------------------------------------------------
# commands: all are checked; those that need no network, no GPU and no hub are run

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
        from tools.memory import read_run

        options = ("--world-size=", "--gpu-gb=")
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


# those of docs/make_it_yours.md are of folders that tools/fork.py makes: tests/test_recipes.py runs these
COMMANDS = {" ".join(words): words for page, text in PAGES.items() if "yours" not in page for words in commands(text)
            if len(words) > 1 and not words[1].startswith(("-m", "--")) or "torchrun" in words[0] and script_of(words)[0]}


def test_commands_name_scripts_configs_and_keys():
    for words in COMMANDS.values():
        check_command(words)


# why a command is not run below: what it needs, or which test or script runs it as it stands
NOT_HERE = re.compile("|".join((
    r"llama|tldr|gsm8k|vllm|countdown|hf:|verl/|(?<!/)\bmine\b|\bchat\.jsonl",  # models and data of others, or the reader's
    r"\btorchrun\b",  # several ranks: tests/test_parallel.py, test_two_machines.py
    r"\bbash\b|data/(?!example)\w+/\w+\.py|code_|judge|label",  # runs/ itself; quickstart.sh, code.sh and judge.sh have these
    r"tensorboard|tests/|--help",  # installed by few; tests of their own
    r"tools/bench\.py|tools/memory\.py")))  # tests/test_tools.py, test_memory.py
RUN = [command for command in COMMANDS if not NOT_HERE.search(command)]
SMALL = dict(max_iters=1, batch_size=8, group_size=4, max_new_tokens=6, micro_batch_size=4, eval_size=4, num_minibatches=1,
             limit=2, samples=2, device_type="cpu")
ORDER = ["data/example/prepare.py", "sft.py", "rm.py", "ppo.py", "grpo.py"]  # then the tools, which look at what these leave


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """{command: what came of it}, of all of them in one folder, which looks like the repository after the quickstart."""
    folder = tmp_path_factory.mktemp("commands")
    world = tiny.build(f"{folder}/world")
    home = folder / "home"
    (home / "data").mkdir(parents=True)
    os.symlink(world.root, home / "data" / "arithmetic")
    for name in ("byte_tokenizer.py", "convert.py"):
        os.symlink(os.path.join(ROOT, "data", name), home / "data" / name)
    (home / "data" / "example").mkdir()  # where it writes
    for name in ("prepare.py", "reward.py"):
        shutil.copy(os.path.join(ROOT, "data", "example", name), home / "data" / "example")
    for name in ("config", "options", "grading", "tools", *files("*.py")):
        os.symlink(os.path.join(ROOT, name), home / name)
    for run, model in (("sft", "policy"), ("rm", "reward_model")):
        (home / "out" / f"arithmetic_{run}").mkdir(parents=True)
        os.symlink(world.policy if model == "policy" else world.reward, home / "out" / f"arithmetic_{run}" / model)
    jobs = {"quickstart": ["ppo.py", "config/arithmetic_ppo.py"],  # and what config/arithmetic_hydra.py begins with:
            "lora": ["rm.py", "config/arithmetic_rm.py", "--lora=16", "--out_dir=out/arithmetic_rm_lora"]}
    place = {script: number for number, script in enumerate(ORDER)}
    for command in sorted(RUN, key=lambda c: place.get(script_of(COMMANDS[c])[0], 9)):
        script, given = script_of(COMMANDS[command])
        jobs[command] = [f"{home}/{script}" if "prepare" in script else script, *given]
        # in a folder of its own, unless it is what the config says, or says where
        if (script in ORDER[1:] and "--out_dir" not in command
                and re.search(r"arithmetic_(?:sft|rm)\.py|--|^(?!.*config)", command)):
            jobs[command].append(f"--out_dir=out/run_{len(jobs)}")
    for name, (script, *given) in jobs.items():
        small = {key: value for key, value in SMALL.items() if key in read_keys(os.path.join(ROOT, script))}
        jobs[name] = dict(one_run(script, [*given, *tiny.arguments(small)]), folder="home")
    return in_a_row(str(folder), jobs)


def test_all_of_bring_your_own_is_run():
    section = PAGES["README.md"].partition("## Change it")[2].partition("## ")[0]
    block = [" ".join(words) for words in commands(section) if words[0] == "python" and "--help" not in words]
    assert len(block) >= 7 and set(block) <= set(RUN)
    assert {"sft.py", "rm.py", "ppo.py", "grpo.py"} <= {script_of(COMMANDS[command])[0] for command in block}


def test_commands_run(outcomes):
    for command, (outcome,) in outcomes.items():
        assert outcome["kind"] == "", (command, outcome["message"])


# ---------------------------------------------------------------------------------------------------------------------
# keys and names


def keys_of(path):
    """The keys or options of a file, if it is a script."""
    source = read(path)
    if "configure(globals()" in source:
        return read_keys(path).keys()
    return {option.replace("-", "_") for option in re.findall(r"add_argument\(\"--([\w-]+)\"", source)}


KEYS = set().union(*map(keys_of, files("*.py", "tools/*.py", "recipes/*.py", "data/*.py", "data/*/*.py", "tests/*.py",
                                       "runs/peers/*.py")))
OTHERS = {"key", "help", "index_url", "max_restarts", "shutdown_timeout", "nproc_per_node", "nnodes", "rdzv_backend",
          "rdzv_endpoint", "rdzv_id", "rdzv_conf", "local_dir", "repo_type"}  # of pip, torchrun and hf
OTHERS |= {"job_name", "nodes", "ntasks_per_node", "gpus_per_node", "cpus_per_task", "time", "signal", "requeue", "open_mode"}
OTHERS |= {"world_size", "gpu_gb"}  # of tools/memory.py
OTHERS |= {"build_arg", "rm", "gpus", "shm_size", "network", "privileged"}  # of SLURM, and of docker
OTHERS |= {"refresh"}  # of tools/fork.py


@pages
def test_options_and_names_of_a_page_exist(page):
    text = PAGES[page]
    for option in re.findall(r"--([a-z][\w-]*)", text):
        assert option.replace("-", "_") in KEYS | OTHERS, f"--{option}"
    for key in re.findall(r"`([a-z_]+) ?= ?[^`]*`", text):
        assert key in KEYS or re.search(rf"^ *{key} = ", SOURCE, re.MULTILINE), f"{key} = ..."
    for name in re.findall(r"`([A-Za-z]\w*_\w+)`", text):
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
    short = dict(max_iters=1)
    both = dict(max_iters=2, reward_functions=rewards, importance_cap=2, roles="train=1,generate=1,score=1", staleness=1)
    runs = dict(ppo=world.ppo("out", value_init="policy", ptx_path=world.texts, **both),
                grpo=world.grpo("out", max_refills=1, **both),
                sft=world.sft("out", **short), rm=world.rm("out", **short),
                taught=world.rm("out", teacher=world.second_reward, **short),
                ppo_one=world.ppo("out", value_init="policy", **short),
                alone=world.grpo("out", reward_functions=f"{folder}/seen.py:seen", **short))
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
    several_turns = {f"objective/{name}" for name in ("turns", "environment_share", "failed_calls")}  # test_turns.py
    gpu_alone = {"time/mfu"} | several_turns
    logged = {key for key in logged if not key.startswith("time/") or key in explained}
    assert logged | gpu_alone == explained | gpu_alone


def test_a_reward_of_ones_own_is_given_what_the_page_says(logs):
    assert "completions" in GIVEN and logs["alone"][0]["objective/scores"] == len(GIVEN)
