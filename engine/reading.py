"""
How a reward model reads a prompt and a response. One that rm.py has trained reads the very tokens
of the policy, or the same text in its own tokens. One that others have trained reads as they and
transformers do (class Reader): prompt and response are a dialogue in its own chat template, and its
score is read at the last token that is not its pad_token_id.
"""
from data import naming
from engine.tokenizers import Tokenizer, check_tokenizer_fits
from errors import BadInput, warn
from formats import where_is


def reader_of(reward_model, tokenizer, reward_format, path):
    """
    What encodes prompt and response for a reward model: its tokenizer, where rm.py has trained it,
    else a Reader; and a line that says how it is read, or None.

    reward_format: the key; chat or plain make a Reader of any reward model. path: the reward
    model's, for messages. Raises BadInput where there is no chat template for chat, and where the
    model is a plain language model or another tokenizer's.
    """
    check_tokenizer_fits(tokenizer, reward_model, path)
    if reward_model.new_head:
        raise BadInput(f"{path!r} has no score head, it is a plain language model; "
                       "train one with rm.py")
    config = reward_model.hf.config
    if getattr(config, "auto_map", None):
        warn(f"{path}: its config.json names code of its own (auto_map), which is not run: if that "
             f"computes another score than a {config.model_type} with one label, this is wrong")
    ours = hasattr(config, "score_shift")  # rm.py writes it
    if reward_format == "auto" and ours:
        return tokenizer, None
    if reward_format == "chat" and not tokenizer.template:
        raise BadInput(f"reward_format = 'chat', but the tokenizer of {path} has no chat template; "
                       "type --reward_format=plain")
    chat = bool(tokenizer.template) and reward_format != "plain"
    skipped_id = config.pad_token_id
    reader = Reader(tokenizer, chat, skipped_id)
    whose = "" if ours else "not trained by rm.py; "
    how = "as plain text, with EOS behind it"
    if reader.chat:
        how = "in its own chat template"
    where = "its last token"
    if reader.skipped_id is not None:
        where += f" that is not its padding (pad_token_id = {reader.skipped_id})"
    return reader, (f"reward model {path}: {whose}it reads prompt and response {how}, and is "
                    f"scored at {where}")


def reads_beside(reward_tokenizer, tokenizer):
    """
    What encodes other texts than the sampled ones for a reward model, such as demonstrations: one
    that reads the policy's own tokens gets these texts, too, in the policy's tokenizer, which knows
    the run's system_prompt and chat_template.
    """
    same = reward_tokenizer.fingerprint == tokenizer.fingerprint
    return tokenizer if same else reward_tokenizer


def ids_read(reader, rows, path, fields, model):
    """
    What a reward model reads of each row's completions: [[ids of each of the fields], ...], up to
    the token at which its score is read. reader: from reader_of. path: of the rows, for messages.
    Raises BadInput, also where a text does not fit into the model's context.
    """
    found, longest = [], model.max_positions
    for number, row in enumerate(rows):
        with naming(*where_is(rows, path, number)):
            found.append([ids_of(reader, row["prompt"], row[field]) for field in fields])
            if max(map(len, found[-1])) > longest:
                raise BadInput(f"{max(map(len, found[-1]))} tokens of a reward model whose context "
                               f"has {longest}; leave the row out")
    return found


def ids_of(reader, prompt, completion):
    """ids_read of one text. What stands behind the token that is read changes nothing in it."""
    if not isinstance(reader, Reader):
        return reader.encode_example(prompt, completion)[0]
    ids = list(reader.encode_response(prompt, completion))
    while len(ids) > 1 and ids[-1] == reader.skipped_id:
        ids.pop()
    return ids


class Reader(Tokenizer):
    """
    The tokenizer of a reward model that is read as transformers reads it. Its fingerprint is no
    other tokenizer's: such a model never reads the policy's tokens, but encodes the text anew.
    """

    def __init__(self, tokenizer, chat, skipped_id):
        """chat: in its chat template; skipped_id: the pad_token_id of its config.json, or None."""
        self.tokenizer, self.chat, self.skipped_id = tokenizer, chat, skipped_id
        self.fingerprint = f"{tokenizer.fingerprint} in {'chat' if chat else 'plain text'}"
        self.chat_fingerprint = tokenizer.chat_fingerprint
        self.special_texts, self.vocab_size = tokenizer.special_texts, tokenizer.vocab_size
        self.eos_id, self.pad_id = tokenizer.eos_id, tokenizer.pad_id

    @property
    def vocabulary(self):
        return self.tokenizer.vocabulary

    def encode_prompt(self, prompt):
        """Ids of a prompt with an empty response, for checks of what will fit. Raises BadInput."""
        return self.encode_response(prompt, "", True)

    def encode_response(self, prompt, completion, finished=True):
        """
        In a chat a string is a user's (prompt) or the assistant's message (completion), and the ids
        are all that the template writes, also behind the end of the last turn. As plain text: the
        prompt, the completion, and EOS if it has finished. Raises BadInput.
        """
        if not self.chat:
            return self.plain(prompt, completion) + [self.eos_id] * finished
        return self.tokenizer.encode_whole(as_dialogue(prompt, completion))

    def plain(self, prompt, completion):
        """Ids of prompt and completion as one text, behind BOS if there is one."""
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise BadInput("this reward model reads plain text, and here is a list of messages; "
                           "write strings, or take a reward model with a chat template")
        return list(self.tokenizer.bos_ids) + self.tokenizer.encode(prompt + completion)


def as_dialogue(prompt, completion):
    """
    The messages of prompt and completion, each a string or a list of messages. A completion behind
    an assistant's message goes on with that message.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    last, first = prompt[-1], completion[0]
    if last["role"] == first["role"] == "assistant":
        return [*prompt[:-1], last | {"content": last["content"] + first["content"]},
                *completion[1:]]
    return [*prompt, *completion]
