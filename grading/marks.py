"""How models of many families mark their thoughts; answers.py loads it for other than <think>."""
import re

# how models write thoughts: in turn a mark before them, and the mark behind them
THOUGHTS = [*map(re.escape, """
    <think> </think>  <thinking> </thinking>  <thought> </thought>  <reasoning> </reasoning>
    <seed:think> </seed:think>  <mm:think> </mm:think>  [THINK] [/THINK]  [unused16] [unused17]
    <ifm|think> </ifm|think>  <ifm|think_fast> </ifm|think_fast>  <|think:start|> <|think:end|>
    <|START_THINKING|> <|END_THINKING|>  <|channel>thought <channel|>  <|think|> <|content|>
    <|begin_of_thought|> <|end_of_thought|>  <|inner_prefix|> <|inner_suffix|>  ◁think▷ ◁/think▷
    <|open|>think<|sep|> <|close|>think<|sep|>
    """.split()),
    r"<\|channel\|>(?!final)\w*(?:<\|message\|>)?",  # Harmony, of gpt-oss
    r"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>",
    r"\AHere is my thought process:", "Here is my response:",  # Granite 3.2
    r"\AHere are my reasoning steps:", r"\[BEGIN FINAL RESPONSE\]"]  # Apriel
MARKS = re.compile("(?=[<[◁H])(?:" + "|".join(f"({mark})" for mark in THOUGHTS) + ")")
# what some models write around the answer
FRAMES = re.compile(r"""<\|(START|END)_(RESPONSE|TEXT)\|>|</?response>|\[END\ FINAL\ RESPONSE\]
    |<\|(begin|end)_of_solution\|>|<\|(open|close)\|>(response|message)<\|sep\|>|<\|end\|>""", re.X)
