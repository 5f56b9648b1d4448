"""
Put a saved model, or an adapter, on the Hugging Face hub: all files of its folder, the model card
(README.md) among them. Read the card first: it names the run's data and settings.

python tools/push.py --folder=out/arithmetic_ppo/policy --repo=me/adder
python tools/push.py --folder=out/arithmetic_ppo/policy --repo=me/adder --private=True

It needs a token that may write: `hf auth login`, or HF_TOKEN in the environment.
"""
import os
import re
import sys

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure  # noqa: E402
from engine.hf_files import base_of, find_folder, is_adapter, tensor_files  # noqa: E402
from errors import BadConfig, BadInput, first_line, warn  # noqa: E402


# --------------------------------------------------------------------------------------------------
folder = "out/arithmetic_ppo/policy"  # of a saved model, or of an adapter
repo = ""  # where to: NAME/MODEL on the hub; it is made, if it is not there
private = False  # a repository that is made is private
config = configure(globals())
# --------------------------------------------------------------------------------------------------

if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
    raise BadConfig(f"repo = {repo!r}; wanted NAME/MODEL, your name on the hub and a name for the "
                    "model; type --repo=me/model")
if not os.path.isdir(folder):
    raise BadConfig(f"folder {folder!r}: no such folder; train a model first")
find_folder(folder)  # raises, if it is no model's
if not is_adapter(folder):
    tensor_files(folder)  # raises, if weights are missing
elif os.path.isdir(base_of(folder)) or os.path.isabs(base_of(folder)):
    warn(f"the adapter's base model, {base_of(folder)}, is a folder of this machine, which others "
         "do not have; push that too and write its name on the hub as base_model_name_or_path in "
         f"{folder}/adapter_config.json, or push the whole model")

from huggingface_hub import HfApi, get_token  # noqa: E402

if not get_token():
    raise BadConfig("there is no token for the hub; type `hf auth login`, or set HF_TOKEN to one "
                    "that may write (https://huggingface.co/settings/tokens)")
api = HfApi()
try:
    url = api.create_repo(repo, private=private or None, exist_ok=True)
    api.upload_folder(repo_id=repo, folder_path=folder, commit_message="A model of quartet's")
except Exception as e:  # the hub's client raises errors of several libraries: network, HTTP, names
    raise BadInput(f"{repo}: the hub has not taken it: {first_line(e)[:300]}") from e
print(f"{folder} is at {url}")
