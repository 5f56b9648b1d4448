"""
Prompts and completions that are lists of messages, {"role", "content"}: which a run can learn.
"""
from errors import BadInput, shorten
from prompts import NO_UTF8

# what others write into a message that is not to be learned, such as "weight": 0
NOT_LEARNED = "weight", "train", "training", "trainable", "loss", "loss_mask"
# where others keep the thoughts of an assistant's message; many chat templates do not read them
THOUGHTS_APART = "reasoning_content", "reasoning", "thinking"


def check_messages(messages, field):
    """Raise BadInput unless a data row's field, a list, is messages of text, and not empty."""
    if not messages:
        raise BadInput(f"field {field!r} is empty")
    for number, message in enumerate(messages, 1):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str) or message.get("tool_calls") or message.get(
                "function_call"):
            raise BadInput(f"field {field!r} must be a string, or a list of {{\"role\", "
                           f"\"content\"}} messages of text, found {shorten(message)}")
        if message.get("role") not in ("system", "user", "assistant"):
            raise BadInput(f"field {field!r}, message {number}: the role is "
                           f"{shorten(message.get('role'))}; wanted system, user or assistant")
        if NO_UTF8.search(content) or not content and field == "prompt":
            raise BadInput(f"field {field!r} is empty, or no UTF-8 text: {shorten(content)}")


def check_learned(messages, field):
    """Raise BadInput unless messages are a completion that is learned as it is."""
    for message in messages:
        for key, value in beside_its_content(message).items():
            raise BadInput(f"field {field!r}: " + (
                f"thoughts in {key!r} would not be learned; write them into 'content', as the "
                "model shall: <think>...</think>" if key in THOUGHTS_APART else
                f"{key!r} is {value!r}, but each answer in it is learned; end the prompt behind "
                "this one"))
    if {messages[0]["role"], messages[-1]["role"]} != {"assistant"}:
        raise BadInput(f"field {field!r}: a completion begins and ends with the assistant")


def beside_its_content(message):
    """
    {key: value} of an assistant's message that would be lost if its content is learned: thoughts,
    and a mark that it is not to be learned. {} of others.
    """
    if message["role"] != "assistant":
        return {}
    thoughts = {key: message[key] for key in THOUGHTS_APART if message.get(key)}
    return thoughts | {key: message[key] for key in NOT_LEARNED
                       if message.get(key) not in (None, 1)}
