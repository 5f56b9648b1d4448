"""A tiny world in a folder, made without training, and the scripts run in it as a user runs them. Helpers, no tests."""
import atexit
import itertools
import json
import os
import re
import random
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.append(os.path.join(ROOT, "data"))

from byte_tokenizer import write_byte_tokenizer  # noqa: E402

MARKERS = ["<think>", "</think>"]


def jsonl(path, rows):
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read_text(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def read_json(path):
    return json.loads(read_text(path))


def read_jsonl(path):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def read_log(out_dir):
    """The records of out_dir/log.jsonl."""
    return read_jsonl(os.path.join(out_dir, "log.jsonl"))


def read_weights(folder):
    """{name on disk: tensor} of a saved model, in the dtype of the file; it may have been cut into several."""
    from safetensors.torch import load_file

    files = [name for name in os.listdir(folder) if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", name)]
    assert len(files) == 1 or "model.safetensors" not in files, files
    return {name: t for file in files for name, t in load_file(os.path.join(folder, file)).items()}


def distance(folder, other):
    """The largest difference between two saved models' weights."""
    a, b = read_weights(folder), read_weights(other)
    assert a.keys() == b.keys()
    return max((a[n].double() - b[n].double()).abs().max().item() for n in a)


def measured(record):
    """A record of a log without what no two runs share."""
    return {k: v for k, v in record.items() if not k.startswith(("time/", "mem/"))}


def alike(a, b, tolerance):
    """Two records, or lists of records, with numbers within tolerance and all else equal."""
    if isinstance(a, list):
        return len(a) == len(b) and all(alike(x, y, tolerance) for x, y in zip(a, b, strict=True))
    same = [abs(a[k] - b[k]) <= tolerance * max(1, abs(a[k])) if isinstance(a[k], float) else a[k] == b[k] for k in a if k in b]
    return a.keys() == b.keys() and all(same)


def assert_same_run(out, other, models=("policy",), tolerance=0.0):
    """Two runs have sampled the same texts, and their figures and weights are the same within tolerance. Returns the log."""
    a, b = ([measured(record) for record in read_log(folder)] for folder in (out, other))
    assert len(a) > 1 and [r.get("objective/texts") for r in a] == [r.get("objective/texts") for r in b]
    assert alike(a, b, tolerance), [(x, y) for x, y in zip(a, b, strict=False) if not alike([x], [y], tolerance)]
    for model in models:
        assert distance(f"{out}/{model}", f"{other}/{model}") <= tolerance, model
    return b


def is_one_line(result, script, words, code=2):
    """All ranks of a run of forked.py ended with this code, and rank 0 alone has said why, in one line that has these words."""
    said, *others = result["stderr"]
    assert set(result["codes"]) == {code} and not any(others), result
    assert said.startswith(f"{os.path.basename(script)}: error: ") and said.count("\n") == 1 and len(said) < 750, said
    assert not [word for word in words if word not in said], said


def user(text):
    return dict(role="user", content=text)


def assistant(text):
    return dict(role="assistant", content=text)


def system(text):
    return dict(role="system", content=text)


RULES = """
import os, time

def letters(batch):
    return [sum(ch.isascii() for ch in c) / 8 for c in batch["completions"]]

def odd(batch):  # the groups of every other prompt are flat
    return [n if int(row["prompt"][0]) % 2 else 0.1 for n, row in zip(letters(batch), batch["rows"])]

def flat(batch):
    return [0.1] * len(batch["rows"])

def prompts(batch):
    return [text == row["prompt"] for text, row in zip(batch["prompts"], batch["rows"], strict=True)]

def some(batch):  # the responses of an odd length have no score
    return [None if len(c) % 2 else len(c) / 8 for c in batch["completions"]]

def talks(messages, row, seed):  # an environment
    return None if seed % 3 == 0 else "xyz"[seed % 3], len(messages[-1]["content"]) / 9

calls = 0

def fades(batch):  # the evaluation and the rollout of iteration 0, then nothing
    global calls
    calls += 1
    return letters(batch) if calls <= 2 else flat(batch)

late = 0

def raises_late(batch):
    global late
    late += 1
    return raises(batch) if late > 3 else letters(batch)

def raises(batch):
    return [row["missing"] for row in batch["rows"]]

def not_a_number(batch):
    return [float("nan")] * len(batch["rows"])

def few(batch):
    return [1.0]

def text(batch):
    return "1.0"

def hangs(batch):
    time.sleep(1000)

def best(batch):
    return [n - max(letters(batch)) for n in letters(batch)]  # of no responses, there is no best

def on_rank_1(function):
    return lambda batch: (function if os.environ.get("RANK") == "1" else letters)(batch)

for function in (raises, not_a_number, few, text, hangs):
    globals()[function.__name__ + "_on_1"] = on_rank_1(function)
"""


class World:
    """The paths of a tiny world, and the arguments that point a script at it."""

    def __init__(self, root):
        self.root = str(root)

    def __getattr__(self, name):  # world.policy, world.rl_train, ...: files end in .jsonl, folders do not
        path = os.path.join(self.__dict__["root"], name)
        return path if os.path.isdir(path) else path + ".jsonl"

    def ppo(self, out_dir, **keys):
        """--key=value for ppo.py: a small run whose every part does something."""
        return self.rl(out_dir, dict(batch_size=7, ppo_epochs=2, value_learning_rate=5e-3) | keys)

    def grpo(self, out_dir, **keys):
        """--key=value for grpo.py: five groups of three, so that two and three ranks part them in the middle."""
        return self.rl(out_dir, dict(batch_size=15, group_size=3, num_iterations=2,
                                     reward_functions=f"{self.rule('letters')},0.5*reward_model") | keys)

    def rl(self, out_dir, keys):
        defaults = dict(
            out_dir=out_dir, policy_path=self.policy, reward_path=self.reward, prompts_path=self.rl_train, eval_path=self.rl_val,
            eval_interval=1000, eval_size=2, max_new_tokens=8, temperature=0.9, micro_batch_size=4, kl_coef=0.2,
            num_minibatches=2, max_iters=3, learning_rate=3e-3, checkpoint_interval=0, timeout=60, reward_timeout=30,
            device_type="cpu")
        if "reward_model" not in keys.get("reward_functions", "reward_model"):
            del defaults["reward_path"]  # given and not used, it is refused
        return arguments(defaults | keys)

    def judged(self, **keys):
        """The keys of a run whose reward is the judge."""
        return dict(reward_functions="judge", judge_path=self.judge, judge_template=f"{self.root}/question.txt") | keys

    def rule(self, name):
        """How the key `rewards` names a function of RULES, below."""
        return os.path.join(self.root, f"rules.py:{name}")

    def sft(self, out_dir, **keys):
        return self.supervised(out_dir, dict(
            train_path=self.sft_train, val_path=self.sft_val, tokenizer_path=self.tokenizer, n_head=2, d_model=16, d_ff=32,
            context=32, eval_size=5) | keys)

    def rm(self, out_dir, **keys):
        return self.supervised(out_dir, dict(demonstrations_path=self.sft_val, init_from=self.policy) | keys)

    def dpo(self, out_dir, **keys):
        """--key=value for recipes/dpo.py."""
        return self.supervised(out_dir, dict(policy_path=self.policy, eval_interval=2, eval_size=5, checkpoint_interval=0,
                                             dtype="float64") | keys)

    def supervised(self, out_dir, keys):
        return arguments(dict(
            out_dir=out_dir, train_path=self.pairs_train, val_path=self.pairs_val, max_iters=3, batch_size=7, micro_batch_size=3,
            warmup_iters=1, learning_rate=3e-3, timeout=60, device_type="cpu") | keys)


def byte_tokenizer(markers=MARKERS):
    """The built-in tokenizer with these markers."""
    from tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(folder, markers)
        return load_tokenizer(folder)


def arguments(keys):
    return [f"--{key}={value}" for key, value in keys.items()]


def build(folder):
    """Tokenizers, a policy, reward models, rules and data in this folder, in a second. Returns a World."""
    import torch

    from checkpoint import save_model
    from tokenizer import load_tokenizer
    from scratch import from_scratch

    tokenizers = {}
    for name, markers in (("tokenizer", MARKERS), ("other_tokenizer", MARKERS[::-1])):
        write_byte_tokenizer(os.path.join(folder, name), markers)
        tokenizers[name] = load_tokenizer(os.path.join(folder, name))
    tokenizer = tokenizers["tokenizer"]
    # four embeddings more than tokens: they must never be sampled, nor counted in a probability
    config = dict(model_type="gpt2", n_embd=32, n_layer=1, n_head=2, n_inner=64, n_positions=32, tie_word_embeddings=False,
                  vocab_size=tokenizer.vocab_size + 4, bos_token_id=None, eos_token_id=tokenizer.eos_id,
                  pad_token_id=tokenizer.pad_id, initializer_range=32**-0.5)
    policy = from_scratch(config, seed=1)
    with torch.no_grad():  # about one token in six is the EOS: responses of all lengths, some of them cut off
        direction = policy.hf.lm_head.weight[tokenizer.eos_id]
        policy.hf.transformer.ln_f.bias.copy_(4.0 * direction / direction.square().sum())
    save_model(os.path.join(folder, "policy"), policy, tokenizer)
    for name, tokenizer_name, context, seed in (
            ("reward", "tokenizer", 32, 2), ("other_reward", "other_tokenizer", 32, 2), ("short_reward", "tokenizer", 10, 2),
            ("second_reward", "tokenizer", 32, 3)):
        model = from_scratch(config | dict(n_positions=context), head="scalar", seed=seed)
        model.score_shift = 0.25
        save_model(os.path.join(folder, name), model, tokenizers[tokenizer_name])

    judge = from_scratch(config | dict(n_positions=80), seed=3)  # with a tokenizer of its own, and room for a question
    save_model(os.path.join(folder, "judge"), judge, tokenizers["other_tokenizer"])
    for name, text in (("question.txt", "answers: y n\nGood? {prompt}{response} "),
                       ("other_question.txt", "answers: 1, 2, 3\nright: {response}, to {prompt} ({answer})\n")):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
            f.write(text)

    rng = random.Random(0)  # numbers of one to three digits: the prompts differ in length, so that padding matters
    problems = [(rng.randrange(10 ** rng.randint(1, 3)), rng.randrange(10 ** rng.randint(1, 3))) for _ in range(200)]
    rl = [dict(prompt=f"{a}+{b}=", answer=str(a + b)) for a, b in problems]
    sft = [dict(prompt=f"{a}+{b}=", completion=f"<think>{a % 10 + b % 10}</think>{a + b}" if a % 3 == 0 else str(a + b))
           for a, b in problems]
    pairs = [dict(prompt=f"{a}+{b}=", chosen=str(a + b), rejected=str(a + b + 1 + a % 50)) for a, b in problems]
    with open(os.path.join(folder, "rules.py"), "w", encoding="utf-8") as f:
        f.write(RULES)
    jsonl(os.path.join(folder, "texts.jsonl"), [dict(text=f"{a} and {b}"[:3 + a % 8]) for a, b in problems[60:90]])
    for name, rows in (("rl", rl), ("sft", sft), ("pairs", pairs)):
        jsonl(os.path.join(folder, f"{name}_train.jsonl"), rows[:40])
        jsonl(os.path.join(folder, f"{name}_val.jsonl"), rows[40:52])
    return World(folder)


def add_qwen(world):
    """world.qwen: a policy of another family, tied, with sizes that no number of ranks divides."""
    add_policy(world, "qwen", "qwen3", hidden_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
               head_dim=2, intermediate_size=41, max_position_embeddings=32, tie_word_embeddings=True, vocab_size=263,
               initializer_range=20**-0.5, seed=5)


def add_policy(world, name, family, seed=1, noise=0.0, **sizes):
    """A random policy of a family of transformers as world.NAME. noise: what is added to norms, biases and all else, too."""
    import torch

    from checkpoint import save_model
    from scratch import from_scratch
    from tokenizer import load_tokenizer

    tokenizer = load_tokenizer(world.tokenizer)
    ids = dict(bos_token_id=None, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id)
    model = from_scratch(dict(model_type=family, vocab_size=264) | sizes | ids, seed=seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.empty(p.shape).normal_(0, noise, generator=torch.Generator().manual_seed(p.numel())))
    save_model(f"{world.root}/{name}", model, tokenizer)


# ---------------------------------------------------------------------------------------------------------------------
# running scripts


def run(script, *args, ranks=1, env=None, wrapper=None, stdin="", timeout=600):
    """
    Run a script of the repository as a user does, with torchrun for more than one rank. wrapper: a Python file that is run
    in its place and is given the script and its arguments; see wrap. Returns a CompletedProcess with text.
    """
    script = os.path.join(ROOT, script)  # an absolute path stays itself
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [*([wrapper] if wrapper else []), script, *args]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", PYTHONPATH=ROOT) | (env or {})
    return subprocess.run(command, cwd=ROOT, env=environment, input=stdin, capture_output=True, text=True, timeout=timeout)


forker = None  # the process of forked.py, one for all tests: to import everything takes seconds


def start_forker():
    """Start it, unless it runs. It ends with us: when its stdin is closed."""
    global forker
    if forker is None or forker.poll() is not None:
        errors = tempfile.TemporaryFile("w+")
        forker = subprocess.Popen([sys.executable, os.path.join(ROOT, "tests", "forked.py")], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, stderr=errors, text=True)
        forker.errors = errors


@atexit.register
def stop_forker():
    if forker is not None:
        forker.stdin.close()
        forker.wait()


class Runs(dict):
    """{name: what came of a run}, with what the runs have left: each in folder/name."""

    def __init__(self, folder, results):
        super().__init__(results)
        self.folder = str(folder)

    def succeeded(self):
        """These runs, of which each rank has come to its end."""
        for name, results in self.items():
            for result in results:
                assert {result["kind"]} == {""} if "kind" in result else {*result["codes"]} == {0}, (name, results)
        return self

    def out(self, name):
        return f"{self.folder}/{name}/out"

    def log(self, name):
        return read_log(self.out(name))


def forked(folder, cases, at_once=2):
    """{name: [run, ...]}, as forked.py takes them -> Runs, {name: [result of each]}. Their out_dir is "out" in folder/name."""
    for name in cases:
        os.makedirs(os.path.join(folder, name))
    with open(os.path.join(folder, "cases.json"), "w", encoding="utf-8") as f:
        json.dump([dict(folder=os.path.join(folder, name), runs=runs) for name, runs in cases.items()], f)
    files = [os.path.join(folder, name) for name in ("cases.json", "results.json")]
    ask_forker([*files, at_once])
    with open(files[1], encoding="utf-8") as f:
        return Runs(folder, zip(cases, json.load(f), strict=True))


def ask_forker(message):
    """Wait until forked.py has answered, however long that takes: it ends runs that hang (campaign.LONGEST)."""
    start_forker()
    print(json.dumps(message), file=forker.stdin, flush=True)
    if not forker.stdout.readline():
        forker.errors.seek(0)
        raise AssertionError(forker.errors.read() or "forked.py has not answered")


def one_run(script, *ranks):
    """A run for forked; each rank is its arguments, or (arguments, code)."""
    return dict(script=script, ranks=[dict(args=r) if isinstance(r, list) else dict(args=r[0], code=r[1]) for r in ranks])


def run_patches(code, rank, modules):
    """
    Run a case's code, which may put functions of its own in the place of these modules' functions.
    Modules that have imported such a function by its name get the new one, too.
    """
    before = [(module, dict(vars(module))) for module in modules]
    exec(code, {"RANK": rank})
    changed = {id(old): vars(module)[name] for module, names in before
               for name, old in names.items() if callable(old) and vars(module).get(name) is not old}
    for module, names in before:
        for name, old in names.items():
            if id(old) in changed and vars(module).get(name) is old:
                setattr(module, name, changed[id(old)])


# Code for runs. `now` is the iteration, and in iteration 1 `once` lets something happen before a function is called.
NOW = """
import prompts
now, original_rows = -1, prompts.batch_rows
def batch_rows(seed, iteration, *rest):
    global now
    now = iteration
    return original_rows(seed, iteration, *rest)
prompts.batch_rows = batch_rows
"""
ONCE = """
def once(owner, name, action):
    f, done = getattr(owner, name), []
    def changed(*args, **kwargs):
        if now == 1 and not done:
            done.append(action())
        return f(*args, **kwargs)
    setattr(owner, name, changed)
"""


def stops(iteration, rank=0):
    """
    Code: this rank is asked by SIGTERM to stop, when it draws the rows of this iteration; and once, however many it
    draws. On a slow machine a second signal would come a second later, and so end the process at once.
    """
    return f"""
import os, signal
import prompts
drawn, asked = prompts.batch_rows, []
def stopped(seed, iteration, *rest):
    if iteration == {iteration} and RANK == {rank} and not asked:
        asked.append(os.kill(os.getpid(), signal.SIGTERM))
    return drawn(seed, iteration, *rest)
prompts.batch_rows = stopped
"""


def ends(seconds):
    """Code with two ways to lose a rank: die(); and hang(), for so many seconds, longer than the timeout."""
    return f"""
import os, signal, time
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def hang():
    time.sleep({seconds})
    os._exit(9)
"""


# One of this rank's gradients is inf in each step, counted from 1, of which WHEN, an expression of `steps`, is true.
OVERFLOW = """
import parallel
zero, reduce, steps = parallel.zero_gradients, parallel.all_reduce_gradients, 0
def zero_and_spoil(gradients):  # what is whole may be sent before all_reduce_gradients is called
    global steps
    steps += 1
    zero(gradients)
    buffers = next(iter(gradients.values()))
    if WHEN and not hasattr(buffers[0], "parts"):
        buffers[0].flat[0] = float("inf")
def spoil_and_reduce(gradients, *rest):
    buffers = next(iter(gradients.values()))
    if WHEN and hasattr(buffers[0], "parts"):
        buffers[0].parts()[0].view(-1)[0] = float("inf")
    reduce(gradients, *rest)
parallel.zero_gradients, parallel.all_reduce_gradients = zero_and_spoil, spoil_and_reduce
"""


def overflow(when):
    return OVERFLOW.replace("WHEN", when)


def wrap(path, code):
    """Write a wrapper: the code, which may patch modules, then the script as if it had been called itself."""
    with open(path, "w", encoding="utf-8") as f:
        f.write(f"import os, runpy, sys\nRANK = int(os.environ.get('RANK', 0))\n{code}\n"
                "sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n")
    return str(path)


# All the runs of a process share one group of ranks: torchrun's store still has the addresses of a group that has left.
ONE_GROUP = """
import torch.distributed as dist
join, leave = dist.init_process_group, dist.destroy_process_group
dist.init_process_group = lambda *args, **kwargs: dist.is_initialized() or join(*args, **kwargs)
dist.destroy_process_group = lambda: None
"""


# Many runs in one process a rank: it forks once, and what torch does at an operation's first call is done
# once. Each run begins with our modules as they were before the first one, as in a process of its own.
ROW = """
import contextlib, io, json, os, runpy, sys, time
import campaign, tiny
import launch
meeting, run_path, ours = launch.meet, runpy.run_path, [sys.modules[name] for name in campaign.OURS]
launch.meet = lambda *args: dist.is_initialized() or meeting(*args)

def row(*_, **__):
    home, outcomes, kept = os.getcwd(), {}, []
    for name, job in json.load(open(WORK)).items():
        os.makedirs(f"../{job['folder']}", exist_ok=True)
        os.chdir(f"../{job['folder']}")
        mine, before, began = job["ranks"][RANK], [dict(vars(module)) for module in ours], time.process_time()
        script = os.path.join(tiny.ROOT, job["script"])
        sys.argv, kind, message, out, err = [script, *mine["args"]], "", "", io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                tiny.run_patches(mine.get("code", ""), RANK, ours)
                # kept: as in a process of its own, a run's models are not freed beside torch's threads, where
                # the last ones of a row once ended in "double free or corruption"
                kept.append(run_path(script, run_name="__main__"))
            except (Exception, SystemExit) as e:
                kind, message = type(e).__name__, str(e)
        outcomes[name] = dict(kind=kind, message=message, stdout=out.getvalue(), stderr=err.getvalue(),
                              seconds=time.process_time() - began)
        for module, variables in zip(ours, before):
            vars(module).update(variables)
        os.chdir(home)
        if kind not in ("", "Stop", "BadConfig", "BadInput", "SystemExit"):
            break  # this rank may have left the others in the middle of something
    with open(f"outcomes-{RANK}.json", "w") as f:
        json.dump(outcomes, f)
    if dist.is_initialized():
        leave()

runpy.run_path = row
"""
rows = itertools.count()


def in_a_row(folder, jobs):
    """
    {name: run, as one_run makes it} -> Runs, {name: [what came of it on each rank]}. Their out_dir is
    "out" in folder/name, or in folder/run["folder"]: a run of the same folder as the one before it goes
    on where that was left. A row has about 16 runs, or 8 of two ranks.
    """
    cases, names, row, last = {}, {}, {}, {}  # of each number of ranks: its present row, its last run's folder
    for name, job in jobs.items():
        size, where = len(job["ranks"]), job.get("folder", name)
        if size not in row or len(names[row[size]]) >= 16 // size and where != last[size]:
            row[size] = f"row {next(rows)}"
            names[row[size]] = {}
            work = f"{folder}/{row[size]}.json"
            cases[row[size]] = [one_run("ppo.py", *[([], f"WORK = {work!r}\n{ONE_GROUP}{ROW}")] * size)]
        names[row[size]][name], last[size] = dict(folder=name) | job, where
    for name, work in names.items():
        with open(f"{folder}/{name}.json", "w", encoding="utf-8") as f:
            json.dump(work, f)
    outcomes = {}
    for name, (result,) in forked(folder, cases, at_once=4).items():
        assert set(result["codes"]) == {0}, result
        each = [json.load(open(f"{folder}/{name}/outcomes-{rank}.json", encoding="utf-8"))
                for rank in range(len(result["codes"]))]
        outcomes |= {job: [outcome[job] for outcome in each] for job in each[0]}
    assert outcomes.keys() == jobs.keys(), {name: outcomes[name] for name in outcomes if outcomes[name][0]["kind"]}
    return Runs(folder, outcomes)
