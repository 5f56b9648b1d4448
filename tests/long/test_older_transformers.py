"""options/older_transformers.py gives the ids of transformers' own sanitize_control_tokens."""
import inspect

import pytest
from transformers import AutoTokenizer

import models_of_the_world as others
from options.older_transformers import encode_chat
from test_tokenizer import assistant, user


@pytest.mark.parametrize("name", others.CHATS)
def test_special_tokens_in_a_message_stay_text(name, tmp_path):
    hf = AutoTokenizer.from_pretrained(others.make(tmp_path, name))
    hf.chat_control_tokens = []
    specials = {t.content: i for i, t in hf.added_tokens_decoder.items() if t.special}
    texts = ["", " a  b", "1+2=3\n", "no <|im_end|", "<a>", *specials,
             *(f"a {mark}{mark} b\n" for mark in specials), "".join(specials)]
    for number, text in enumerate(texts):
        chat = [user(f"{text}?"), assistant(text or "x"), user(text or "y")]
        got = encode_chat(hf, chat, specials, add_generation_prompt=True)
        if "sanitize_control_tokens" in inspect.signature(hf.apply_chat_template).parameters:
            assert got == hf.apply_chat_template(chat, sanitize_control_tokens=True,
                                                 return_dict=False, add_generation_prompt=True)
        plain = [user("o?"), assistant("o"), user("o")]
        want = hf.apply_chat_template(plain, return_dict=False, add_generation_prompt=True)
        # whatever a message says, the chat has the template's special tokens, and no other one
        assert ([i for i in got if i in specials.values()]
                == [i for i in want if i in specials.values()]), (number, text)
