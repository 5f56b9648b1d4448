"""
Models as people have them, in miniature: tiny random weights, a tokenizer trained in a moment with
the special tokens of its family, and a chat template in the family's style, written by us.
make(folder, name) writes one, as a Hugging Face folder that transformers loads. Helpers, no tests.

    llama3.2   headers, the date of today, a system turn always, contents stripped
    qwen2.5    ChatML, a system prompt of its own; the base model: ends with <|endoftext|>, the
               template with <|im_end|>
    qwen3      ChatML, thoughts: an empty block before the last answer, earlier thoughts dropped
    mistral    [INST] ... [/INST], a blank before the answer, </s>; roles alternate; no system turn
    pythia     GPT-NeoX, no template
"""
import os

from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        processors, trainers)

from configurator import write_json
from test_families import SIZES
from test_model import random_model
from test_tokenizer import CHATML, bpe_of_blanks

TEXTS = 3 * [
    "You are a helpful assistant. Answer in one word.", "What is the capital of France? It is "
    "Paris, of course.", "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n",
    "user assistant system tool ipython think", "The quick brown fox jumps over the lazy dog; isn't"
    " it? I've said we're here.", "1+2=3, 17*23=391 and 2024-07-26.",
    "def add(a, b):\n    return a + b\n\n\n", "caf\u00e9 na\u00efve \u4f60\u597d \U0001f600",
    "Sure! Here is what I know:\n\n- one\n- two\n"]

LLAMA = """{{- bos_token }}{%- set system = "" %}
{%- if messages[0].role == "system" %}
    {%- set system, messages = messages[0].content | trim, messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + (date_string or strftime_now("%d %b %Y")) + "\\n\\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
    {{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" }}
    {{- message.content | trim + "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
"""
QWEN25 = """{%- if messages[0].role != "system" %}
    {{- "<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n" }}
{%- endif %}
""" + CHATML
QWEN3 = CHATML.replace('message["content"]', """(message.content.split("</think>")[-1].lstrip("\\n")
    if message.role == "assistant" and not loop.last else
    "<think>\\n\\n</think>\\n\\n" + message.content
    if message.role == "assistant" and "</think>" not in message.content else message.content)
""") + """{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}
    {{- "<think>\\n\\n</think>\\n\\n" }}
{%- endif %}
"""
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("roles must alternate: user, assistant, user, assistant ...") }}
    {%- endif %}
    {%- if message.role == "user" %}{{- "[INST] " + message.content + " [/INST]" }}
    {%- else %}{{- " " + message.content | trim + eos_token }}{%- endif %}
{%- endfor %}
"""

# how the words are cut before they merge: as in Meta's llama3/tokenizer.py, which is GPT-4's manner
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
         r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
END = "<|endoftext|>"
QWEN = dict(special=[END, "<|im_start|>", "<|im_end|>"],
            added=["<tool_response>", "</tool_response>"])
# weights: the family of the model; special: special tokens; added: tokens beside the vocabulary
# that are text; roles: of tokens; generation: generation_config.json, with tokens for ids
FAMILIES = {
    "llama3.2": dict(
        weights="llama", template=LLAMA, added=[],
        special=["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
                 "<|eom_id|>", "<|eot_id|>"],
        roles=dict(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"),
        generation=dict(eos_token_id=["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
                        bos_token_id="<|begin_of_text|>", do_sample=True, temperature=0.6)),
    "qwen2.5": dict(
        QWEN, weights="qwen2", template=QWEN25, roles=dict(eos_token=END, pad_token=END),
        generation=dict(eos_token_id=END, do_sample=False, max_new_tokens=2048)),
    "qwen3": dict(
        weights="qwen3", template=QWEN3, special=QWEN["special"],
        added=[*QWEN["added"], "<think>", "</think>"],
        roles=dict(eos_token="<|im_end|>", pad_token=END),
        generation=dict(eos_token_id=["<|im_end|>", END], pad_token_id=END, do_sample=True)),
    "mistral": dict(
        weights="mistral", template=MISTRAL, added=[],
        special=["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
        roles=dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>"),
        generation=dict(bos_token_id="<s>", eos_token_id="</s>")),
    "pythia": dict(
        weights="gpt_neox", template=None, special=[END, "<|padding|>"], added=["  ", "    "],
        roles=dict.fromkeys(["bos_token", "eos_token", "unk_token"], END), generation={})}
CHATS = [name for name, what in FAMILIES.items() if what["template"]]
CLASSES = dict(qwen2="Qwen2Tokenizer", qwen3="Qwen2Tokenizer", gpt_neox="GPTNeoXTokenizer",
               mistral="LlamaTokenizer", llama="PreTrainedTokenizerFast")


def make(folder, name, head="lm"):
    """
    Write one of FAMILIES: config.json, model.safetensors, generation_config.json and the
    tokenizer's files. head: "lm", or "scalar" for a reward model as others leave it, with one
    label. Returns the folder, a string.
    """
    os.makedirs(folder := str(folder), exist_ok=True)
    family, roles = FAMILIES[name]["weights"], FAMILIES[name]["roles"]
    ids, generation = make_tokenizer(folder, name), FAMILIES[name]["generation"]
    sizes = SIZES | dict(vocab_size=-(-len(ids) // 64) * 64, max_position_embeddings=512)  # padded
    if family != "gpt_neox":
        sizes |= dict(head_dim=8)
    sizes |= {f"{role}_id": ids.get(roles.get(role)) for role in ("bos_token", "eos_token")}
    scalar = head == "scalar"
    sizes["pad_token_id"] = ids[roles.get("pad_token", roles["eos_token"])] if scalar else None
    random_model(family, sizes, scalar, noise=0.1).save_pretrained(folder)
    if os.path.isfile(settings := f"{folder}/generation_config.json"):
        os.remove(settings)
    if generation and not scalar:
        write_json(settings, {
            key: [ids[token] for token in x] if isinstance(x, list) else ids.get(x, x)
            for key, x in generation.items()})
    return folder


def make_tokenizer(folder, name):
    """Write the tokenizer's files as the hub's folders have them. Returns {token: id}."""
    what = FAMILIES[name]
    special, added, roles = what["special"], what["added"], what["roles"]
    backend = bpe_of_blanks(special, TEXTS, 700) if name == "mistral" else train_bytes(name)
    if name != "mistral":
        backend.add_special_tokens([AddedToken(s, normalized=False) for s in special])
        backend.add_tokens([AddedToken(s, normalized=name == "pythia") for s in added])
    if name in ("mistral", "llama3.2"):
        bos = roles["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))])
    ids = backend.get_vocab()
    config = dict(
        roles, tokenizer_class=CLASSES[what["weights"]], model_max_length=131072,
        clean_up_tokenization_spaces=name in ("llama3.2", "pythia"),
        added_tokens_decoder={str(ids[s]): dict(
            content=s, lstrip=False, rstrip=False, single_word=False, special=s in special,
            normalized=name == "pythia" and s in added) for s in [*special, *added]})
    if what["template"]:
        config["chat_template"] = what["template"]
    if name in ("qwen2.5", "qwen3"):
        backend.model.save(folder)  # vocab.json and merges.txt
    if name == "mistral":
        config |= dict(add_bos_token=True, add_eos_token=False, legacy=True)
    backend.save(f"{folder}/tokenizer.json")
    write_json(f"{folder}/tokenizer_config.json", config)
    return ids


def train_bytes(name):
    """A byte-level BPE, cut into words as the family does."""
    backend, level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name != "pythia":
        level = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.pre_tokenizer, backend.decoder = level, decoders.ByteLevel()
    if name != "llama3.2":
        backend.normalizer = normalizers.NFC()
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return backend
