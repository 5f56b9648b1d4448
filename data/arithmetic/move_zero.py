"""
A reward model of rm.py -> one as the hub has them: it does not say where its zero is, and all its
scores are higher by a constant. Which of two answers scores higher does not change.

    python data/arithmetic/move_zero.py --by=-15

For models of the family gpt2, such as the toy's: the bias of the last norm carries score_shift and
the constant. runs/zero.sh trains on such models.
"""
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# Python looks for modules in this file's folder; ours are in the repository's, two folders above.
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

import torch  # noqa: E402

from configurator import configure  # noqa: E402
from engine.adapters import load_whole  # noqa: E402
from engine.checkpoint import save_model  # noqa: E402
from engine.disk import write_json  # noqa: E402
from engine.tokenizers import load_tokenizer  # noqa: E402
from errors import BadInput  # noqa: E402
from formats import check_kept  # noqa: E402

reward_path = "out/arithmetic_rm/reward_model"  # a reward model of rm.py
out = "out/arithmetic_rm/moved"  # the folder of the new one
by = 15.0  # how much higher all scores become
configure(globals())

check_kept(out, "out", [reward_path])
reward_model, tokenizer = load_whole(reward_path, "scalar"), load_tokenizer(reward_path)
norm = getattr(reward_model.hf.base_model, "ln_f", None)
if norm is None:
    raise BadInput(f"reward_path {reward_path!r}: there is no last norm ln_f with a bias to move "
                   "its zero with; give a model of the family gpt2")
head = reward_model.hf.score.weight[0]  # (d,)
with torch.no_grad():  # a score is head * (normalised state + bias)
    norm.bias += (reward_model.score_shift + by) * head / head.square().sum()
save_model(out, reward_model, tokenizer)
file = os.path.join(out, "config.json")
with open(file, encoding="utf-8") as f:
    config = json.load(f)
del config["score_shift"]  # which rm.py writes, and others do not
write_json(file, config)
print(f"saved {out}: its scores are higher by {by:g}, and it does not say where its zero is")
