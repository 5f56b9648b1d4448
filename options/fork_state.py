"""
What goes from one iteration to the next in a fork. An optimizer may keep more than tensors in the
state of each parameter: numbers in its groups (as Prodigy and ScheduleFree do), lists in its state,
counters of its own. These go into state.json, as Python writes them, and what no checkpoint can
have is refused by name, in run.state, too. When a run resumes: are the tensors this optimizer's?
"""
import ast
import contextlib
import json
import re
from itertools import zip_longest

import torch

import parallel
from checkpoint import unwrapped
from configurator import read_json
from errors import BadInput, shorten

# these keep all in state and in groups; of other classes one looks for tensors at other places
KNOWN = "torch.", "bitsandbytes.", "options."


def put_into_state(run):
    """
    A collective: put what optimizers keep beside tensors into run.state["run/optimizers"]. Raises
    TypeError by the name of what JSON would not give back as it was, and BadInput as values_of.
    """
    if "iteration" in run.state:  # before a collective: it may be in the state of one rank alone
        raise TypeError("run.state['iteration'] is run.py's own; choose another name")
    for name, x in run.state.items():
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            if repr(json.loads(json.dumps({name: x}))) == repr({name: x}):
                continue
        raise TypeError(f"run.state[{name!r}] = {shorten(x)}: a checkpoint is JSON, and would not "
                        "give it back as it is; keep numbers, texts, truths, None, lists, or dicts "
                        "by text, such as x.item() or list(x)")
    run.state["run/optimizers"] = {
        name: values_of(name, run.models[name], optimizer, run.made_with[name])  # COLLECTIVE
        for name, optimizer in run.optimizers.items()}


def values_of(name, model, optimizer, made):
    """
    A collective: {parameter: [its group's values, its state's values]} that state.json can have;
    {"": [the optimizer's own values, {}]}. Of groups and own values only those that differ from
    `made`, by checkpoint.settings_of at first: the others are settings, which a key may change when
    the run resumes. Raises BadInput by the name of a value that a checkpoint cannot have.
    """
    names, found = {p: full for full, p in model.named_parameters()}, {}
    (groups, own), inner = made, unwrapped(optimizer)
    known = type(inner).__module__.startswith(KNOWN)

    def note(place, which, key, x):
        try:
            if not isinstance(key, str) or "." in key:
                raise TypeError
            found.setdefault(place, [{}, {}])[which][key] = written(x)
        except (TypeError, ValueError, SyntaxError, RecursionError) as e:
            refuse(name, f"{key!r} = {shorten(x)}{f' of {place}' if place else ''}", e)

    with parallel.in_step():  # COLLECTIVE
        for group, before in zip_longest(optimizer.param_groups, groups, fillvalue={}):
            for key, x in group.items():
                if key not in ("params", "lr") and (
                        before.get(key) != repr(x) or not known and hides(x, names)):
                    for p in group["params"]:
                        note(names[p], 0, key, x)
        for p, state in inner.state.items():
            if p not in names:
                refuse(name, f"a state of {shorten(p)}, which is no parameter of the model")
            for key, x in state.items():
                if not torch.is_tensor(x) or not isinstance(key, str) or "." in key:
                    note(names[p], 1, key, x)
        for key, x in () if known else vars(inner).items():
            if key in ("state", "param_groups"):
                continue
            if hides(x, names):
                refuse(name, f"its attribute {key!r}, which has tensors or draws noise")
            if type(x) in (bool, int, float, str, list, tuple, dict) and own.get(key) != repr(x):
                note("", 0, key, x)
    ranks, whole = range(parallel.rank_and_size()[1]), {}
    of_ranks = [parallel.from_rank(found, rank) for rank in ranks]  # COLLECTIVE
    for theirs in of_ranks:
        for place, (values, state) in theirs.items():
            whole.setdefault(place, [values, {}])[1].update(state)
    if inner is not optimizer:  # stage 1: a rank has some parameters' states, but all groups
        of_ranks = [{place: values for place, (values, _) in theirs.items() if values}
                    for theirs in of_ranks]
    if any(theirs != of_ranks[0] for theirs in of_ranks):
        refuse(name, "numbers that differ between the ranks")
    return whole


def refuse(name, what, cause=None):
    raise BadInput(f"{name}'s optimizer keeps {what}: a checkpoint cannot have it, and the run "
                   "that resumes would be another one; keep tensors in state[p], and numbers, "
                   "truths, texts or lists of them in state[p] or param_groups") from cause


def written(x):
    """A value as Python writes it. Raises where it would read another one."""
    if repr(value_of(repr(x))) != repr(x):
        raise TypeError
    return repr(x)


def value_of(text):
    """The inverse of written."""
    return ast.literal_eval(NotFinite().visit(ast.parse(text, mode="eval")))


class NotFinite(ast.NodeTransformer):
    """It puts numbers in the place of the names inf and nan, which literal_eval does not know."""

    def visit_Name(self, node):
        return ast.Constant(float(node.id))


def hides(x, names, depth=4):
    """Whether a tensor is in x that is no parameter of the model, `names`, or a generator."""
    if torch.is_tensor(x):
        return x not in names
    if type(x).__name__ in ("Generator", "Random", "RandomState"):
        return True
    if isinstance(x, dict):
        x = [*x.keys(), *x.values()]
    elif not isinstance(x, (list, tuple, set)) and hasattr(x, "__dict__") and not callable(x):
        x = list(vars(x).values())
    return depth > 0 and isinstance(x, (list, tuple, set)) and any(
        hides(y, names, depth - 1) for y in x)


def put_back(model, optimizer, saved):
    """The inverse of values_of, for a newly made optimizer."""
    for key, x in saved.get("", [{}])[0].items():
        setattr(unwrapped(optimizer), key, value_of(x))
    saved = {model.get_parameter(name): values for name, values in saved.items() if name}
    for group in optimizer.param_groups:
        for p in group["params"][:1]:  # all of a group have the same
            group |= {key: value_of(x) for key, x in saved.get(p, [{}])[0].items()}
    own = {p for group in unwrapped(optimizer).param_groups for p in group["params"]}
    for p, (_, state) in saved.items():
        if p in own and state:
            unwrapped(optimizer).state[p].update((key, value_of(x)) for key, x in state.items())


def needed(folder, present):
    """
    {file: ""} of what a resume reads of the files that are present in a checkpoint, or would read
    if it were there: its manifest has to name them. A model without its optimizer is not whole, nor
    an optimizer without its model. Raises OSError, ValueError or TypeError for config.json.
    """
    config = {**read_json(f"{folder}/config.json")}
    pattern = r"(([^/]+)(/model|_optimizer)|ema|batches)[.-][^/]*safetensors"
    found = [match for file in present if (match := re.fullmatch(pattern, file))]
    stems = {f"{match[2]}{part}" for match in found if match[2]
             for part in ("/model", "_optimizer")}
    if config.get("ema_decay"):
        stems.add("ema")
    if config.get("staleness") and config.get("script") in ("ppo.py", "grpo.py"):
        stems.add("batches")  # others have the key, too, without an effect
    lacking = [f"{stem}.safetensors" for stem in stems - {match[1] for match in found}]
    return dict.fromkeys([*(match[0] for match in found), *lacking], "")


def restored(folder, name, model, optimizer, tensors):
    """
    Put a checkpoint's values into a model's optimizer; (name, whole tensor) of its tensors, as they
    come. Raises BadInput where one is of no trained parameter. An AdamW needs three of each
    parameter, or none of any, of its shape: a kernel would read beside it.
    """
    saved = read_json(f"{folder}/state.json").get("run/optimizers", {})
    put_back(model, optimizer, saved.get(name, {}))
    where = f"{folder}/{name}_optimizer"
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    adamw, seen = isinstance(unwrapped(optimizer), torch.optim.AdamW), {}
    for full, t in tensors:
        name, _, key = full.rpartition(".")
        if name not in parameters:
            raise BadInput(f"{where}: {full} is of no trained parameter; give the same model")
        wanted = () if key == "step" else parameters[name].shape
        if adamw and t.shape != wanted:
            raise BadInput(f"{where}: {full} is of the shape {tuple(t.shape)}, not "
                           f"{tuple(wanted)}; delete this checkpoint, or choose another --out_dir")
        seen.setdefault(name, set()).add(key)
        yield full, t
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    for name, p in parameters.items() if adamw and seen else ():
        keys = seen.get(name, set())
        lacks = {"step", "exp_avg", "exp_avg_sq"} - keys
        # of shards some have never had a gradient
        if lacks and p in stepped and (keys or not parallel.is_shard(p)):
            raise BadInput(f"{where} has no {name}.{min(lacks)}; delete this checkpoint, or choose "
                           "another --out_dir")
