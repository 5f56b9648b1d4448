"""
A tiny world in a folder, and the scripts run in it as a user runs them; for the tests (tiny.py) and
tools/prove.py.

The models are random ones of transformers with a width of 16, saved in float64. A byte is a token;
then come two markers, EOS, padding, and four ids that must never be sampled, nor counted. A run is
a fork of this process: torch is there already, and it takes half a second.
"""
import functools
import glob
import importlib
import json
import os
import re
import runpy
import shutil
import signal
import socket
import sys
import time
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
import transformers
from byte_tokenizer import write_byte_tokenizer
from torch.utils._pytree import tree_leaves

# In a fork torch renews its pool of threads when the first thread asks for it. Autograd asks in two
# threads at once, and then the run ends with "Invalid thread pool!"; this asks before.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MARKERS, EOS, PAD, VOCABULARY = ["<think>", "</think>"], 258, 259, 264
ENDS = [257, EOS]  # generation_config.json names a second token that ends a response
PROMPTS = ["a", "abc", "yes: ", "<think>", "dddd", "b c", "xyzzy!", "ab</think>cd", "z", "cab",
           "12", "é"]
# <think> alone is no answer
ANSWERS = {prompt: PROMPTS[5 * i % 12].strip("<>") for i, prompt in enumerate(PROMPTS)}
RULES = """
def letters(batch):
    return [sum(ch in "abcd" for ch in text) / 4 for text in batch["completions"]]

def sometimes(batch):  # the same for all responses to a prompt of odd length: flat groups
    return [0.3 if len(row["prompt"]) % 2 else x for x, row in zip(letters(batch), batch["rows"])]

def some(batch):  # it does not apply to texts of odd length
    return [None if len(text) % 2 else x for x, text in zip(letters(batch), batch["completions"])]

def steps(batch):  # a number for each token
    tokens = batch["tokens"].double()
    return ((tokens > 96).double() * (tokens < 101) - tokens / 400) * batch["response_mask"]

def talks(messages, row):  # an environment
    turn = len(messages) // 2
    return None if turn == 3 else "xyz"[turn - 1], len(messages[-1]["content"]) % 3 / 2
"""
TEMPLATE = """{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.role == 'assistant' %}
<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}""".replace("\n", "")


def write(path, text):
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)
    return str(path)


def jsonl(path, rows):
    return write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_jsonl(path):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def read_log(out):
    """The records of a log, without what no two runs share."""
    return [{key: x for key, x in record.items() if not key.startswith(("time/", "mem/", "run/"))}
            for record in read_jsonl(f"{out}/log.jsonl")]


def read_weights(folder):
    from safetensors.torch import load_file

    return load_file(f"{folder}/model.safetensors")


def save_random(folder, kind="gpt2", markers=MARKERS, seed=1, shift=None, scalar=False):
    """
    A random model with its tokenizer: gpt2, or neox, whose head is tied to the embedding. scalar: a
    reward model; else it says a few letters most of the time, and an end once in five tokens.
    """
    config = transformers.AutoConfig.for_model(
        "gpt2" if kind == "gpt2" else "gpt_neox", vocab_size=VOCABULARY, bos_token_id=None,
        eos_token_id=EOS, pad_token_id=PAD, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, tie_word_embeddings=kind != "gpt2",
        **{"n_inner" if kind == "gpt2" else "intermediate_size": 24})
    if scalar:
        config.num_labels = 1
    if shift is not None:
        config.score_shift = shift
    auto = (transformers.AutoModelForSequenceClassification if scalar else
            transformers.AutoModelForCausalLM)
    model, drawn = auto.from_config(config).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.empty(p.shape).normal_(0, 0.2, generator=drawn))
            if p.dim() == 1 and name.endswith("weight"):  # of a norm
                p.add_(1.0)
        if not scalar:
            # one coordinate of the last state is always there, and some tokens look for it
            norm = "gpt_neox.final_layer_norm" if kind == "neox" else "transformer.ln_f"
            model.get_submodule(norm).bias[0] = 3.0
            likely = torch.zeros(VOCABULARY)
            likely[[*b"abcdxyz", 256, 257]], likely[EOS] = 1.3, 1.4
            model.get_output_embeddings().weight[:, 0] = likely
            model.generation_config.eos_token_id = ENDS
    model.save_pretrained(folder)
    write_byte_tokenizer(folder, markers)


def build(folder):
    """Models, rules and data: a namespace of their paths, and of the `rows` of each file."""
    world = SimpleNamespace(root=folder, rows={}, rules=write(f"{folder}/rules.py", RULES))
    for seed, (name, how) in enumerate(dict(
            policy={}, tied=dict(kind="neox"), reward=dict(scalar=True, shift=0.25),
            other=dict(scalar=True, shift=-0.5, kind="neox", markers=MARKERS[::-1]),
            uncentered=dict(scalar=True), older={}).items(), 1):
        save_random(f"{folder}/{name}", seed=seed, **how)
        setattr(world, name, f"{folder}/{name}")
    kinds = dict(rl=[], sft=[], pairs=[])
    for i, prompt in enumerate(PROMPTS):
        right, wrong = PROMPTS[5 * i % 12], PROMPTS[(7 * i + 3) % 12] * (1 + i % 2)
        more = dict(margin=i / 5, confidence=0.5 + i / 40) if i % 3 else {}
        kinds["rl"].append(dict(prompt=prompt, answer=ANSWERS[prompt]))
        kinds["sft"].append(dict(prompt=prompt, completion=right * (1 + i % 2)))
        kinds["pairs"].append(dict(prompt=prompt, chosen=right, rejected=wrong) | more)
    kinds["pairs"].append(dict(prompt="tie", chosen="ab", rejected="ab"))
    for kind, rows in kinds.items():
        for part, some in (("train", rows[:9]), ("val", rows[9:])):
            world.rows[f"{kind}_{part}"] = some
            setattr(world, f"{kind}_{part}", jsonl(f"{folder}/{kind}_{part}.jsonl", some))
    # what talks in several turns: a policy whose turns </think> does not end, a chat template
    world.talks, world.chatty = f"{world.rules}:talks", shutil.copytree(
        world.policy, f"{folder}/chatty")
    with open(f"{world.policy}/generation_config.json", encoding="utf-8") as f:
        write(f"{world.chatty}/generation_config.json", json.dumps(
            json.load(f) | dict(eos_token_id=EOS)))
    world.template = write(f"{folder}/template.jinja", TEMPLATE)
    world.rows["texts"] = [dict(text=text) for text in PROMPTS[1:6]]
    world.texts = jsonl(f"{folder}/texts.jsonl", world.rows["texts"])
    return world


def several_turns(world):
    """Keys of a run in which the policy talks with an environment."""
    return dict(environment=world.talks, chat_template=world.template, policy_path=world.chatty,
                max_turns=3, max_new_tokens=16)


def typed(keys):
    return [f"--{key}={value}" for key, value in keys.items()]


COLLECTIVES = "all_reduce", "all_gather", "broadcast"
# what nccl can send; bool as uint8, so it adds none
SENT = {getattr(torch, name) for name in (
    "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool")}


def as_nccl(collective, *args, **kwargs):
    """One of our collectives; what gloo takes and nccl refuses is an error."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    for t in tensors:
        assert t.dtype in SENT and t.is_contiguous() and not t.is_sparse, (collective, t)
        assert t.dtype == tensors[0].dtype and t.device == tensors[0].device, (collective, tensors)
        assert t.dtype != torch.bool or "reduce" not in collective.__name__, collective
    return collective(*args, **kwargs)


class Started:
    """
    A run that goes on in a folder, of one process a rank. before(rank) is called in each of them
    before the script: it may patch what it likes.
    """

    def __init__(self, script, args, folder, ranks=1, before=lambda rank: None):
        os.makedirs(folder, exist_ok=True)
        self.folder, self.codes = folder, {}
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.pids = [self.fork(script, args, rank, ranks, before) for rank in range(ranks)]

    def fork(self, script, args, rank, ranks, before):
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.chdir(self.folder)
            # as in a shell: under nohup, or behind an &, this process ignores Ctrl-C
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout = sys.__stdout__ = os.fdopen(1, "w", 1, closefd=False)
            sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, closefd=False)
            if ranks > 1:
                os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                                   MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port))
                for name in COLLECTIVES:
                    setattr(dist, name, partial(as_nccl, getattr(dist, name)))
            sys.argv = [os.path.join(ROOT, script), *args]
            before(rank)
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as e:
            code = e.code or 0
            if isinstance(code, str):  # as Python does
                print(code, file=sys.stderr)
                code = 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self, kill=False):
        """The exit codes of all ranks, None as long as one runs. kill: end them all."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                if kill:
                    os.kill(pid, signal.SIGKILL)
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        if len(self.codes) == len(self.pids):
            return [self.codes[rank] for rank in range(len(self.pids))]
        return None

    def wait(self, seconds=300):
        """Wait until all ranks have ended, at most so long: .codes, .out and .err of each rank."""
        end = time.time() + seconds
        while (codes := self.poll(kill=time.time() > end)) is None:
            time.sleep(0.01)
        out, err = ([open(f"{self.folder}/{name}-{rank}").read() for rank in range(len(codes))]
                    for name in ("stdout", "stderr"))
        return SimpleNamespace(codes=codes, out=out, err=err)


def of_copy(folder):
    """For `before`: the repository's modules are those of a copy of it, in this folder."""
    def before(rank):
        sys.path[:] = [folder] + [path for path in sys.path if path != ROOT]
        for name, module in [*sys.modules.items()]:
            file = str(getattr(module, "__file__", ""))
            if (file.startswith(f"{ROOT}/") and "/lib/python" not in file.removeprefix(ROOT)
                    or name in ("options", "grading")):
                del sys.modules[name]

    return before


def at(iteration, action, rank=0):
    """For `before`: this rank does it, or gets the signal, when it draws the iteration's rows."""
    def before(mine):
        import prompts

        drawn, left = prompts.batch_rows, [action]

        def batch_rows(seed, now, *rest, **more):
            if now == iteration and mine == rank and left:  # the first time
                left.clear()
                action() if callable(action) else os.kill(os.getpid(), action)
            return drawn(seed, now, *rest, **more)

        prompts.batch_rows = batch_rows

    return before


def rooms_of(root):
    """The modules of the root that are no scripts."""
    paths = [path for path in sorted(glob.glob(f"{root}/*.py"))
             if "configure(globals()" not in open(path, encoding="utf-8").read()]
    return [importlib.import_module(os.path.basename(path)[:-3]) for path in paths]


def wrap(rooms, name, first=None, then=None):
    """
    The rooms' function of this name gets a part before it, first(*args), and one behind it,
    then(result, *args), whose result, if it has one, takes the place of the function's.
    """
    def new(*args, **more):
        if first:
            first(*args)
        result = f(*args, **more)
        other = then(result, *args) if then else None
        return result if other is None else other

    for home in rooms:
        f = vars(home).get(name)
        if getattr(f, "__module__", "") == getattr(home, "__module__", home.__name__):
            functools.update_wrapper(new, f)
            for room in rooms:
                for other in [n for n, x in vars(room).items() if x is f]:
                    setattr(room, other, new)
            return


class Runs:
    """Runs of a script, two at a time, each in a folder of its own: start(spec) begins one."""

    def __init__(self, start, script, keys, folder, how):
        self.start, self.script, self.keys = start, script, keys
        self.folder, self.how = folder, how
        self.waiting, self.going, self.ended = {}, {}, {}

    def ask(self, name, keys=(), how=(), ranks=1, after="", where=""):
        """
        A run will be made. keys: what is typed, too. how: for start. after: the run that must
        have ended before it. where: the run whose folder it goes on in.
        """
        self.waiting[name] = dict(
            script=self.script, keys=self.keys | dict(keys), how=self.how | dict(how), ranks=ranks,
            after=after, folder=f"{self.folder}/{where or name}")

    def get(self, name):
        """A run that has ended: its codes, log, weights; what it said; the notes of each rank."""
        while name not in self.ended:
            for other, (started, end, spec) in list(self.going.items()):
                codes = started.poll(kill=time.time() > end)
                if codes is not None:
                    del self.going[other]
                    self.ended[other] = read(spec["folder"], codes)
            for other, spec in list(self.waiting.items()):
                if len(self.going) < 2 and (not spec["after"] or spec["after"] in self.ended):
                    self.going[other] = self.start(spec), time.time() + 600, self.waiting.pop(other)
            time.sleep(0.01)
        return self.ended[name]

    def close(self):
        for started, _, _ in self.going.values():
            started.poll(kill=True)


def read(folder, codes):
    """What a run has left: codes, log, weights; what it said last; the notes of each rank."""
    def lines(name):
        paths = [f"{folder}/{name}-{rank}" for rank in range(len(codes))]
        return [open(path).read().splitlines() if os.path.exists(path) else [] for path in paths]

    told = next((said for said in lines("stderr") if said), [f"nothing; exit codes {codes}"])
    own = [re.search(r'"(.*)", line (\d+)', line) for line in told
           if line.startswith("  File") and "/lib/python" not in line and '"<' not in line]
    place = "".join(f" ({os.path.relpath(at[1])}, line {at[2]})" for at in own[-1:])
    run = SimpleNamespace(codes=codes, said=told[-1][:400] + place, log=[], weights={}, notes=[
        [json.loads(line) for line in noted] for noted in lines("notes")])
    if os.path.exists(f"{folder}/out/log.jsonl"):
        run.log = read_log(f"{folder}/out")
    for path in sorted(glob.glob(f"{folder}/out/*/model.safetensors")):
        model = os.path.dirname(path)
        run.weights |= {f"{os.path.basename(model)}/{name}": t
                        for name, t in read_weights(model).items()}
    return run
