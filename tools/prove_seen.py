"""
What tools/prove.py does inside a small run: it changes one thing, and notes what is seen. The
functions of the rooms are wrapped before the script imports them, in whichever room they stand.

A note is a line of JSON in a file of the rank: "state", the plain values that live when an
iteration begins; "batch", sums of an iteration's columns and of its steps' gradients, in the order
of the page; "look", a fault that can be seen at once; "end", what the last policy says of a batch.
"""
import contextlib
import functools
import json
import os
import random
import re
import sys
import time
from types import SimpleNamespace

import numpy
import small_world
import torch
from small_world import rooms_of, wrap


def root_of(script):
    """The folder with the rooms that a script imports: its own, or the one above it."""
    folder = os.path.dirname(script)
    return folder if os.path.exists(f"{folder}/run.py") else os.path.dirname(folder)


def before(spec):
    """
    For small_world.Started: what happens in a rank's process before the script begins. A run that
    is elsewhere begins anew, in a Python that has other hashes of texts.
    """
    how, root, cwd = spec["how"], root_of(spec["script"]), os.getcwd()

    def prepare(rank):
        os.chdir(cwd)  # files that a key names are found as in the run itself
        if "elsewhere" in how and os.environ.get("PYTHONHASHSEED") != "4242":
            prove = os.path.join(os.path.dirname(os.path.abspath(__file__)), "prove.py")
            os.execve(sys.executable, [sys.executable, prove, "--run", json.dumps(spec)],
                      os.environ | dict(PYTHONHASHSEED="4242"))
        if root != small_world.ROOT:
            small_world.of_copy(root)(rank)
        rooms, number = rooms_of(root), 77 if "elsewhere" in how else 0
        random.seed(number), torch.manual_seed(number)
        numpy.random.seed(number)
        if "elsewhere" in how:  # another time of day; new memory is full of NaN
            clock = time.time
            time.time = lambda: clock() + 123456.7
            torch.utils.deterministic.fill_uninitialized_memory = True
            wrap(rooms, "choose_kernels", then=lambda *_: torch.use_deterministic_algorithms(
                True, warn_only=True))
        now = SimpleNamespace(scored=0, steps=0, gradients=[], batch=None, row=0)
        change_batches(rooms, how, now)
        see(rooms, how, now, f"{spec['folder']}/notes-{rank}", root)

    return prepare


# -------------------------------------------------------------------------------------------------
# what is changed of a batch

def change_batches(rooms, how, now):
    def other_rows(batch, *_):
        if "ids" in how:
            T = batch["tokens"].shape[1]
            padding = torch.arange(T) >= batch["lengths"][:, None]
            junk = 97 + torch.arange(padding.numel()).view_as(padding) * 7 % 26
            batch["tokens"] = torch.where(padding, junk, batch["tokens"])
        if "order" in how:
            order = shuffled(len(batch["tokens"]), how["order"])
            batch |= {name: x[order] for name, x in batch.items() if name != "index"}

    def more_columns(_, batch, rows, terms, policy, *args):
        T = batch["tokens"].shape[1]
        for name, x in batch.items():
            if "wide" in how and x.shape[1:] == (T,):
                fill = policy.tokenizer.pad_id if name == "tokens" else 0
                batch[name] = torch.nn.functional.pad(x, (0, how["wide"]), value=fill)

    def stir(batch, terms):
        """Rules that a random policy never fulfils teach nothing: then 0 or 1, by the text."""
        mask = batch["response_mask"]
        ids = (batch["tokens"] * mask * (torch.arange(mask.shape[1]) % 5 + 1)).sum(1)
        for name in [*(f"reward/{name}" for _, name, rule in terms if rule), "accuracy"]:
            x = batch.get(name)
            if x is not None and (x == x[0]).all():
                batch[name] = (ids * 7 % 11 < 5).to(x)
        if "more" in how and now.scored == how["watch"]:  # for the longest that has an end
            now.row = int((mask.sum(1) + 999 * batch["finished"]).argmax())
            for weight, name, _ in terms:
                batch[f"reward/{name}"][now.row] += how["more"] * (-1 if weight < 0 else 1)
        now.scored += 1

    def same_minibatches(order, n, *key):
        if "order" in how and "minibatches" in key:  # the same responses, at their new places
            return shuffled(n, how["order"]).argsort()[order]

    wrap(rooms, "sample_batch", then=other_rows)
    wrap(rooms, "score_batch", then=more_columns)
    wrap(rooms, "add_scores", first=stir)
    wrap(rooms, "permutation", then=same_minibatches)


def shuffled(n, size):
    """An order of n rows in which the groups, and in each another way its rows, change places."""
    if n % size:
        return torch.arange(n)
    number = torch.arange(n // size)[:, None]
    return (number.flip(0) * size + (torch.arange(size) + number) % size).flatten()


# -------------------------------------------------------------------------------------------------
# what is seen

def see(rooms, how, now, path, root):
    from run import Run

    learned, zero, masks = {}, set(), []

    def write(kind, **what):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(dict(kind=kind) | what) + "\n")

    def iterations(run, numbers=Run.iterations):
        learned.update({name: [(p, p.detach().clone()) for p in model.parameters()
                               if p.requires_grad] for name, model in run.trained.items()})
        for iteration in numbers(run):
            now.gradients, now.steps = [], 0
            if "state" in how:
                write("state", iteration=iteration,
                      names=states(sys._getframe(1).f_globals, root))
            if how.get("signal", [-1])[0] == iteration:
                os.kill(os.getpid(), how["signal"][1])
            yield iteration

    def step(run, gradients, lrs, *args, make=Run.step):
        for name, buffers in gradients.items():
            with contextlib.suppress(Exception):  # of shards
                flat = torch.cat([b.flatten() for b in buffers])
                way = torch.sin(torch.arange(len(flat), dtype=flat.dtype))
                now.gradients.append(["gradient", name, now.steps, [
                    flat.norm().item(), flat.dot(way).item()]])
        old = {name: [(p, p.detach().clone(), p.grad.clone()) for p, _ in learned[name]
                      if p.grad is not None] for name in lrs}
        norms = make(run, gradients, lrs, *args)
        for name, parts in old.items():
            # in later steps of an iteration all may be clipped
            if now.steps == 0 and lrs[name] > 0 and name in norms:
                if norms[name] == 0:
                    zero.add(name)
                with contextlib.suppress(Exception):  # of shards
                    if by_sign(parts):
                        write("look", what="sign", name=name)
        now.steps += 1
        return norms

    def logged(run, record, batch=None, *args):
        columns = [["column", name, None, sums_of(x, batch)] for name, x in (batch or {}).items()
                   if name not in ("index", "begins", "lengths")]
        if batch and how.get("watch") == run.iteration:
            now.batch = {name: x.clone() for name, x in batch.items()}
        write("batch", iteration=run.iteration, sums=columns + now.gradients)

    def over(run, *args):
        for name, parameters in learned.items():
            if name in zero or all(torch.equal(p, old) for p, old in parameters):
                write("look", what="zero" if name in zero else "still", name=name)
        if now.batch:
            from model import response_logprobs

            reference = next((name for name in run.models if name.startswith("ref")), "policy")
            with torch.no_grad():
                logprobs, ref = (response_logprobs(
                    run.models[name], now.batch, how["temperature"])[0]
                    for name in ("policy", reference))
            write("end", kl=(logprobs - ref).square().mean().item(),
                  score=logprobs[now.row].sum().item())

    def note_masks(result, batch, *args):
        """Those of a batch, or of micro-batches that are made of it."""
        masks.extend(x["response_mask"] for x in [batch, *(result or [])])

    def check_masks(name, *args):
        for x in args:
            near = [m for m in masks if getattr(x, "dtype", 0) == torch.bool
                    and m.shape[1:] == x.shape[1:]]
            if near and (x[:, None] & ~torch.cat(near)).any(2).all(1).any():  # x: of some rows
                write("look", what="mask", name=name)
        if name == "compute_gae" and args[0].shape == args[2].shape:
            if count := int((args[0].masked_fill(args[2], 0) != 0).sum()):
                write("look", what="lost", name="rewards", count=count)

    Run.iterations, Run.step = iterations, step
    wrap([Run], "log", logged), wrap([Run], "finish", over)
    wrap(rooms, "score_batch", then=note_masks), wrap(rooms, "micro_batches", then=note_masks)
    for name in ("masked_sum", "masked_mean", "masked_whiten", "compute_gae", "add_up",
                 "token_weights"):
        wrap(rooms, name, functools.partial(check_masks, name))


def by_sign(parts):
    """Whether numbers whose gradient is rounding move as far as others. parts: see step."""
    moved = torch.cat([(p.detach() - old).abs().flatten() for p, old, _ in parts])
    size = torch.cat([grad.abs().flatten() for _, _, grad in parts])
    small = (size > 0) & (size < 1e-12 * size.max())
    return bool((moved[small] > 1e-4 * moved.max()).any())


def sums_of(x, batch):
    """Three sums of a (B,) or (B, T), whatever the padding and the order of the rows; else []."""
    mask, x = batch["response_mask"], x.detach()
    B, T = mask.shape
    if x.shape not in ((B,), (B, T)):
        return []
    ids = batch["tokens"].double() % 89 + torch.arange(T) % 7  # a number for each token
    x = x.double().nan_to_num(17.0)
    x, name = (x[mask], ids[mask]) if x.dim() == 2 else (x, torch.where(mask, ids, 0).sum(1))
    return [x.sum().item(), (x * x).sum().item(), (x * name).sum().item()]


def states(names, root):
    """{name: a short text} of all plain values that live in the script, and in the rooms."""
    found = {name: x for name, x in names.items()
             if name not in ("run", "config", "system", "out_dir")}
    for name, module in [*sys.modules.items()]:
        file = str(getattr(module, "__file__", "")).partition(f"{root}/")[2]
        if re.match(r"\w+\.py|(options|grading)/", file) and name not in ("errors", "ranks"):
            found |= {f"{name}.{key}": x for key, x in vars(module).items()}
    known = {}
    for name, x in found.items():
        with contextlib.suppress(Exception):
            if "__" not in name and (text := shown(x)) is not None:
                known[name] = text
    return known


def shown(x, depth=0):
    """A short text of a plain value, tensor, container or small object; None: of anything else."""
    home = type(x).__module__.partition(".")[0]
    if x is None or isinstance(x, (bool, int, float, str)):
        return repr(x)[:60]
    if home == "numpy":  # a generator; or an array, whose repr leaves out what is in the middle
        x = x.bit_generator.state if hasattr(x, "bit_generator") else torch.as_tensor(x)
    if isinstance(x, torch.Tensor):
        return f"{tuple(x.shape)} {x.detach().double().nan_to_num().sum().item()!r}"
    if type(x).__name__ in ("Generator", "Random"):
        return str(hash(str(x.get_state().tolist() if hasattr(x, "get_state") else x.getstate())))
    if isinstance(x, (list, tuple, set, frozenset)) or type(x).__name__ == "deque":
        many = sorted(x, key=str) if isinstance(x, (set, frozenset)) else x
        return f"[{', '.join(str(shown(y, depth + 1)) for y in many)}]" if depth < 4 else None
    if type(x).__module__ == "torch.optim.lr_scheduler":
        x = x.state_dict()
    if getattr(x, "__module__", "") == "__main__":  # what hangs on a class or function
        if hasattr(x, "cache_info"):
            return str(x.cache_info())
        held = [cell.cell_contents for cell in getattr(x, "__closure__", None) or ()]
        held = enumerate([*(getattr(x, "__defaults__", None) or ()), *held])
        x = {key: y for key, y in [*vars(x).items(), *held]
             if "__" not in str(key) and not callable(y)}
    elif not isinstance(x, dict) and not callable(x) and home not in (
            "torch", "transformers", "tokenizers", "functools", "builtins"):
        x = vars(x)
    if isinstance(x, dict) and depth < 4:
        return str({str(key): shown(y, depth + 1) for key, y in x.items()}).replace("'", "")
    return None
