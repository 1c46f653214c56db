"""What transformers makes of chats with tools, thoughts and several templates, and of values that templates print.

Writes chats/cases.json: templates by name, the line of a data file, and the chat as text.

    python3 -m pip install transformers==5.24.0 jinja2
    python3 tests/goldens/chats.py
"""

import datetime
import json
import pathlib

from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

HERE = pathlib.Path(__file__).parent
DAY = datetime.datetime(2025, 3, 9)

TURNS = """\
{%- for m in messages %}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ (m.content or '') }}
{%- for call in m.tool_calls or [] %}{{- '<call>' ~ (call | tojson) ~ '</call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TOOLS = "{%- for tool in tools or [] %}{{- (tool | tojson) ~ '\\n' }}{%- endfor %}" + TURNS
WHOLE = "{%- for m in messages %}{{- m | tojson }}{%- endfor %}"

ASK = '{"role": "user", "content": "Ask."}'
SAY = '{"role": "assistant", "content": "Say."}'
ASKED = f'"messages": [{ASK}, {SAY}]'
TOOL = ('{"type": "function", "function": {"name": "sum", "description": "Adds.", "parameters": {"type": "object", '
        '"properties": {"y": {"type": "number", "enum": [2.50, 1e3]}, "x": {"type": "integer"}}, "required": ["y", "x"]}}}')
CALL = ('{"role": "assistant", "content": null, "tool_calls": [{"type": "function", "id": "c1", '
        '"function": {"name": "sum", "arguments": {"y": 1.0, "x": 99999999999999999999, "more": {"b": [], "a": null}}}}]}')
VALUES = '"tools": [{"z": ["it\'s", "\\"", "é\\n\\u200b"], "f": [1e-7, 1e16, 0.1, -0.0, 1E2, 123456789.125], "i": [-0, 36893488147419103232, 7], "m": {"t": true, "n": null, "e": {}}}]'


def printing(expression):
    return "{%- set v = tools[0] %}{{- " + expression + " }}" + TURNS


CASES = [
    ("order of a tool", {"default": TOOLS}, f'{{{ASKED}, "tools": [{TOOL}]}}'),
    ("order of a call", {"default": TOOLS}, f'{{"messages": [{ASK}, {CALL}], "tools": [{TOOL}]}}'),
    ("keys of a message", {"default": WHOLE},
     '{"messages": [{"name": "n", "content": "a", "role": "user", "b": 1, "a": [2]}, {"x": null, "role": "assistant", "content": "d"}]}'),
    ("other names of thoughts", {"default": WHOLE},
     '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "reasoning": "so", "content": "d"}]}'),
    ("thinking", {"default": WHOLE},
     '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "thinking": "so", "content": "d", "z": 1}]}'),
    ("the standard name of thoughts", {"default": WHOLE},
     '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "reasoning_content": "so", "content": "d"}]}'),
    ("a template for tools", {"default": TURNS, "tool_use": "TOOLS\n" + TOOLS}, f'{{{ASKED}, "tools": [{TOOL}]}}'),
    ("no tools", {"default": TURNS, "tool_use": "TOOLS\n" + TOOLS}, f"{{{ASKED}}}"),
    ("an empty list of tools", {"default": TURNS, "tool_use": "TOOLS\n" + TOOLS}, f'{{{ASKED}, "tools": []}}'),
    ("tools of a template without its own", {"default": TOOLS, "rag": "RAG"}, f'{{{ASKED}, "tools": [{TOOL}]}}'),
    ("the date", {"default": "{{- strftime_now('%d %b %Y, %A %-d.%-m.%y %j') ~ '\\n' }}" + TURNS}, f"{{{ASKED}}}"),
    ("a list", {"default": printing("v.z")}, f"{{{ASKED}, {VALUES}}}"),
    ("floats", {"default": printing("v.f ~ '|' ~ v.f[0] ~ '|' ~ v.f[1] ~ '|' ~ v.f[4]")}, f"{{{ASKED}, {VALUES}}}"),
    ("integers", {"default": printing("v.i ~ v.i[1]")}, f"{{{ASKED}, {VALUES}}}"),
    ("a map", {"default": printing("v.m ~ ' ' ~ v.m.t ~ v.m.n")}, f"{{{ASKED}, {VALUES}}}"),
    ("emitted alone", {"default": printing("v.f[0] }}{{- v.m }}{{- v.f[1]")}, f"{{{ASKED}, {VALUES}}}"),
    ("joined", {"default": printing("v.f | join(';') ~ [v.m, v.i] | join('/') ~ ', '.join(['a', 'b'])")}, f"{{{ASKED}, {VALUES}}}"),
    ("as strings", {"default": printing("(v.f[0] | string) ~ (v.z | string | length) ~ (v.m | string | upper)")}, f"{{{ASKED}, {VALUES}}}"),
    ("mapped", {"default": printing("v.f | map('string') | join(' ')")}, f"{{{ASKED}, {VALUES}}}"),
    ("formatted", {"default": printing("'%s and %s' | format(v.z, v.i[2])")}, f"{{{ASKED}, {VALUES}}}"),
    ("tojson", {"default": printing("v | tojson")}, f"{{{ASKED}, {VALUES}}}"),
    ("tojson, indented", {"default": printing("v | tojson(indent=4)")}, f"{{{ASKED}, {VALUES}}}"),
    ("tojson, short", {"default": printing("v | tojson(separators=(',', ':'))")}, f"{{{ASKED}, {VALUES}}}"),
    ("tojson, sorted and ASCII", {"default": printing("v | tojson(ensure_ascii=True, sort_keys=True)")}, f"{{{ASKED}, {VALUES}}}"),
    ("tojson, arguments in order", {"default": printing("v | tojson(true, 1, [' ,', ' : '])")}, f"{{{ASKED}, {VALUES}}}"),
    ("thoughts of earlier turns", {"default": (HERE / "../../fuzz/corpus/template/qwen").read_text()},
     '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\\nhm\\n</think>\\n\\nb"}, '
     '{"role": "user", "content": "c"}, {"role": "assistant", "content": "<think>\\nso\\n</think>\\n\\nd"}]}'),
]


class Fixed(datetime.datetime):
    @classmethod
    def now(cls):
        return DAY


def main():
    chat_template_utils.datetime = Fixed
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(HERE / "text/bpe/tokenizer.json"), eos_token="<|endoftext|>")
    cases = []
    for name, templates, line in CASES:
        tokenizer.chat_template = templates if len(templates) > 1 else templates["default"]
        record = json.loads(line)
        text = tokenizer.apply_chat_template(record["messages"], tools=record.get("tools"), tokenize=False)
        cases.append({"name": name, "templates": templates, "line": line, "text": text})
    (HERE / "chats").mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (HERE / "chats/cases.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
