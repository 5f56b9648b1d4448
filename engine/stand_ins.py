"""
Random models to measure with: a policy whose responses are as long as one wants, a reward model of
the same size, prompts. transformers loads them, too, so that others can be measured on the same.
"""
import json
import math
import os

import torch

from engine.pretrained import from_scratch, save_pretrained

LETTERS = 0x20000  # the first of 900,000 characters, each of which is a word of the vocabulary


def make(folder, sizes, prompt_length, longest, end_share, prompts=512):
    """
    Write folder/policy, folder/reward_model and folder/prompts.jsonl: random Llamas, a tokenizer
    with one token a character, and prompts of one length.

    sizes: sizes of the Llama, as config.json names them. longest: tokens of the longest response.
    end_share: which share of the sampled tokens is EOS. With 0 every response has `longest` tokens.
    With 2 / longest a response ends by itself after 0.43 x longest tokens on average.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    V = sizes["vocab_size"]
    vocabulary = {chr(LETTERS + i): i for i in range(V - 2)} | {"<eos>": V - 2, "<pad>": V - 1}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(LETTERS)))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token=chr(LETTERS),
        padding_side="left", model_max_length=prompt_length + longest)
    config = dict(sizes, model_type="llama", tie_word_embeddings=False, bos_token_id=None,
                  max_position_embeddings=prompt_length + longest, eos_token_id=V - 2,
                  pad_token_id=V - 1)
    for name, head in (("policy", "lm"), ("reward_model", "scalar")):
        model = from_scratch(config, head)
        if head == "lm":
            end_sometimes(model, end_share)
        save_pretrained(model, os.path.join(folder, name))
        tokenizer.save_pretrained(os.path.join(folder, name))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, V - 2, (prompts, prompt_length), generator=generator)
    with open(os.path.join(folder, "prompts.jsonl"), "w", encoding="utf-8") as f:
        for row in ids.tolist():
            f.write(json.dumps({"prompt": "".join(chr(LETTERS + i) for i in row)}) + "\n")


def end_sometimes(policy, end_share):
    """
    Change a random Llama so that this share of its tokens is EOS, the last but one of the
    vocabulary, and none is padding, the last. All other tokens are about equally likely.

    A Llama's head has no bias, so coordinate 0 of the residual stream becomes one: every embedding
    has a large number there, and no layer writes to it. The last norm divides by the root of the
    mean square of all d coordinates, most of which is this one: it makes sqrt(d) of it.
    """
    V, d = policy.lm_head.weight.shape
    odds = end_share * (V - 2) / (1 - end_share)  # of EOS against one of the V - 2 other tokens
    with torch.no_grad():
        policy.embed.weight[:, 0] = 100.0
        for layer in policy.layers:
            layer.o.weight[0] = 0.0
            layer.down.weight[0] = 0.0
        policy.lm_head.weight[:, 0] = 0.0
        policy.lm_head.weight[-2:] = 0.0
        policy.lm_head.weight[-2, 0] = (math.log(odds) if odds else -50.0) / math.sqrt(d)
        policy.lm_head.weight[-1, 0] = -50.0 / math.sqrt(d)
