"""Rules of the house: imports, keys, collectives, names on the pages, a fork, mutants, the lock."""
import ast
import difflib
import functools
import glob
import graphlib
import os
import re
import runpy
import subprocess
import sys

import pytest
from configurator import read_keys
from mutants import MUTANTS, path_of
from packaging.requirements import Requirement
from tiny import ROOT, Started, in_a_fork, jsonl, keys_of, of_copy, typed, well, write

PAGES = "ppo.py", "grpo.py", "sft.py", "rm.py"


def files(*folders):
    """The Python files of the root, and of these folders."""
    found = glob.glob("*.py", root_dir=ROOT)
    return sorted(found + [f for name in folders for f in glob.glob(f"{name}/*.py", root_dir=ROOT)])


@functools.cache
def text_of(file):
    with open(os.path.join(ROOT, file), encoding="utf-8") as f:
        return f.read()


@functools.cache
def tree_of(file):
    return ast.parse(text_of(file))


def is_there(path):
    return os.path.exists(os.path.join(ROOT, path))


def imported(nodes):
    """The files of the repository that these statements import."""
    names = [name for node in nodes for name in (
        [node.module] if isinstance(node, ast.ImportFrom) else
        [alias.name for alias in node.names] if isinstance(node, ast.Import) else [])]
    names += [f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom)
              for alias in node.names]
    return {path for path in (name.replace(".", "/") + ".py" for name in names) if is_there(path)}


def test_imports_at_the_top_only_point_down_and_to_no_option():
    graph = {file: imported(tree_of(file).body) for file in files()}
    assert not [file for each in graph.values() for file in each if "/" in file or file in PAGES]
    list(graphlib.TopologicalSorter(graph).static_order())  # raises where two import each other


def test_an_option_is_there_under_the_name_by_which_it_is_imported():
    """Otherwise a missing file would be taken for an option that a fork has left out."""
    for file in files("options", "grading", "tools"):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith(("options", "grading")):
                names = imported([node]) or [node.module.replace(".", "/")]
                assert all(map(is_there, names)), (file, node.module)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("optional", "mistake"):
                option, function = f"mistakes.{node.args[0].value}".split(".")[-2:]
                names = [getattr(n, "name", "") for n in tree_of(f"options/{option}.py").body]
                assert function in names, (file, option, function)


def plain_runs(folder, ppo, sft):
    """Runs of ppo.py and sft.py: what is imported, and what is not."""
    of_copy(ROOT)(0)  # all is imported anew
    os.chdir(folder)
    for script, keys in (("ppo.py", ppo), ("sft.py", sft)):
        sys.argv = [script, *typed(keys)]
        runpy.run_path(f"{ROOT}/{script}", run_name="__main__")
        if script == "ppo.py":
            found = [str(getattr(module, "__file__", "")) for module in [*sys.modules.values()]]
            # an environment may lie in the repository
            found = [x for x in found if x.startswith(ROOT) and not x.startswith(sys.prefix)]
            write("files", " ".join(os.path.relpath(file, ROOT) for file in found))
    loaded = {name for name in sys.modules if name.startswith(("options.", "grading."))}
    assert loaded == {"options.cards", "grading.answers"}, loaded


def test_a_plain_run_imports_as_many_files_as_the_readme_says(world, tmp_path):
    """
    And no option but the card at its end: a reader of PPO, or of SFT, needs none of them; and plain
    texts load no forms of answers.
    """
    prompts = jsonl(tmp_path / "prompts.jsonl", [
        dict(prompt="1+2=", answer="3"), dict(prompt="34+5=", answer="39")])
    rows = jsonl(tmp_path / "rows.jsonl", [dict(prompt="12+34=", completion="46")])
    ppo = keys_of(world, "ppo.py", max_iters=1, prompts_path=prompts, eval_path=prompts,
                  max_new_tokens=40, temperature=0.2)  # responses end, and have plain letters
    sft = keys_of(world, "sft.py", max_iters=1, train_path=rows, val_path=rows, out_dir="sft")
    in_a_fork(plain_runs, tmp_path, ppo, sft)
    imported_files = {*(tmp_path / "files").read_text().split(), "ppo.py"} - {"options/cards.py"}
    said = re.search(r"page of (\d+) lines.*? (\d+) files under it, ([\d,]+) lines in all",
                     " ".join(text_of("README.md").split()))
    page, under, in_all = (int(number.replace(",", "")) for number in said.groups())
    assert imported_files <= {*files(), "grading/answers.py"}
    assert under == len(imported_files) - 1, imported_files
    assert abs(page - lines_of(["ppo.py"])) <= 0.03 * page  # so that not each change is one there
    assert abs(in_all - lines_of(imported_files)) <= 0.03 * in_all, lines_of(imported_files)


def lines_of(names, folder=ROOT):
    return sum(open(os.path.join(folder, name), encoding="utf-8").read().count("\n")
               for name in names)


def test_grpo_is_ppo_without_a_value_model():
    """Its page and its loop are no longer than ppo.py's, and few of its lines are others."""
    both = []
    for page in ("ppo.py", "grpo.py"):
        loop = [node for node in tree_of(page).body if isinstance(node, ast.For)][-1]
        both.append((text_of(page).splitlines(), loop.end_lineno - loop.lineno))
    (ppo, ppo_loop), (grpo, grpo_loop) = both
    assert len(grpo) <= len(ppo) and grpo_loop <= ppo_loop
    same = sum(block.size for block in difflib.SequenceMatcher(None, ppo, grpo, False)
               .get_matching_blocks())
    assert len(grpo) - same <= 145


def test_each_shared_key_is_read_by_somebody():
    """As system.KEY or config["KEY"]."""
    read = set()
    for file in files("options", "grading"):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("system"):
                read.add(node.attr)
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "config":
                read |= {ast.unparse(node.slice).strip("'")}
    assert not read_keys(f"{ROOT}/config/keys.py").keys() - read


def collectives(file):
    """The functions whose docstring says that they are a collective, of others or this page."""
    return {"Run"} | {
        node.name for other in files("options") if other not in PAGES or other == file
        for node in ast.walk(tree_of(other)) if isinstance(node, ast.FunctionDef)
        and re.match(r"A collective(?! where)", ast.get_docstring(node) or "")}


def headings(page):
    """As addresses within a page."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text_of(page).lower())
    return {re.sub(r"[^\w\- ]", "", line.strip()).replace(" ", "-")
            for line in re.findall("(?m)^#+ (.*)", text)}


def test_what_the_pages_name_is_there():
    """
    Files; functions, classes and tests that they name as `FILE.py: NAME`; and links between the
    pages lead to a file or to a heading.
    """
    pages, found = glob.glob("**/*.md", root_dir=ROOT, recursive=True), []
    for page in [page for page in pages if not page.startswith("out/")]:  # what runs have left
        for link in re.findall(r"\]\((?!http|ADDRESS)([^)\s]+)\)", text_of(page)):
            file, _, heading = link.partition("#")
            at = os.path.join(os.path.dirname(page), file) if file else page
            assert is_there(at) and (not heading or heading in headings(at)), (page, link)
        if page not in ("README.md", "AGENTS.md") and not page.startswith("docs/"):
            continue
        found += re.findall(r"`([\w/]+\.py): (\w+)`", text_of(page))
        for name in re.findall(r"(?<![\w/])(?:config|recipes|tests|evidence|assets)/[\w/]+\."
                               r"(?!jsonl)\w+", text_of(page)):
            assert name == "recipes/NAME.diff" or is_there(name), (page, name)
    assert len(found) > 50
    for file, name in found:
        assert name in [getattr(node, "name", None) for node in ast.walk(tree_of(file))], name


OTHERS = r"iterations|(?!self)[^.]*\.(append|read)|os\.path\.join"  # other functions of these names


@pytest.mark.parametrize("file", [*PAGES, "batches.py", "rollout.py", "rewards.py", "run.py"])
def test_each_collective_is_marked(file):
    """On one of the call's lines, or of a call or block around it."""
    lines, names = text_of(file).splitlines(), collectives(file)

    def walk(node, marked):
        for child in ast.iter_child_nodes(node):
            last = getattr(child, "end_lineno", 0)
            if isinstance(child, ast.With):
                last = child.body[0].lineno - 1
            around = marked or isinstance(child, ast.Call | ast.With) and any(
                "COLLECTIVE" in line for line in lines[child.lineno - 1:last])
            name = ast.unparse(child.func) if isinstance(child, ast.Call) else ""
            if name.split(".")[-1] in names and not re.fullmatch(OTHERS, name):
                assert around, f"{file}:{child.lineno}: {name}"
            walk(child, around)

    walk(tree_of(file), False)


def test_a_fork_without_options_runs_its_tests(world, tmp_path):
    """
    README's cp line, which docs/fork.md has too, copies so many lines; in the copy ppo, grpo, sft
    and rm run. Tests of an option are skipped; but not if the option is there.
    """
    said, line = re.search(r"copies what it uses, ([\d,]+) lines.*?\n    (cp -r [^\n]+) mine\n",
                           text_of("README.md"), re.DOTALL).groups()
    assert f"\n    {line} mine\n" in text_of("docs/fork.md")
    mine = str(tmp_path / "mine")
    os.mkdir(mine)
    subprocess.run(["bash", "-c", f"{line} {mine}"], cwd=ROOT, check=True)
    lines = lines_of(glob.glob("**/*.py", root_dir=mine, recursive=True), mine)
    assert abs(int(said.replace(",", "")) - lines) <= 0.03 * lines, lines
    for page in PAGES:
        well(f"{mine}/{page}", tmp_path / page, keys_of(world, page, max_iters=1),
             before=of_copy(mine))
    program = write(f"{tmp_path}/a.py", "import pytest, sys\nsys.exit(pytest.main(sys.argv[1:]))")
    argv = ["-q", "-p", "no:cacheprovider", "-rs", "tests/test_by_hand.py", "-kcispo or rloo"]
    done = Started(program, argv, mine, before=of_copy(mine)).wait()
    assert done.codes == [0] and "1 passed, 1 skipped" in done.out[0] and (
        "options/parts.py; type" in done.out[0]), done


def test_each_mutant_can_be_made():
    """mutants.py is run by hand. Its texts stand once in their files, and its tests are there."""
    for tests, slips in MUTANTS.items():
        assert is_there(path_of(tests)), tests
        for file, old, new, chosen in slips:
            assert text_of(file).count(old) == 1 and chosen, (file, old)
            ast.parse(text_of(file).replace(old, new))


def requirements(name):
    lines = [line.partition("#")[0].strip() for line in text_of(name).splitlines()]
    return {r.name: r for r in map(Requirement, filter(None, lines))}


def test_the_lock_is_within_the_ranges():
    """And it is exact; the torch that the pages name is that of the lock."""
    lock = requirements("requirements.lock")
    versions = {name: str(r.specifier).removeprefix("==") for name, r in lock.items()}
    assert all(re.fullmatch(r"[\w.]+", version) for version in versions.values()), versions
    for name, r in requirements("requirements.txt").items():
        assert versions[name] in r.specifier, name
    for page in ("README.md", "requirements.txt"):
        assert {*re.findall(r"torch==([\w.]+)", text_of(page))} <= {versions["torch"]}, page
