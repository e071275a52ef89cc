"""Writes jinja.json: what jinja2 prints in the sandbox that transformers builds for chat templates.

    python make_jinja.py > jinja.json

Every filter, test and global of that environment and every public method of Python's str, list, tuple, dict, int,
float and range meets a set of values and arguments; so do the operators; statements are written by hand. A result is a
text, or 0 where jinja2 raises an error. The order of everything is fixed: the same versions give the same file.
"""

import copy
import json
import sys
import warnings

import jinja2
import transformers
from transformers.utils import chat_template_utils

warnings.filterwarnings("ignore")
compile_template = chat_template_utils._cached_compile_jinja_template
ENV = compile_template("").environment
CONTEXT = {
    "messages": [
        {"role": "user", "content": "Hi <you> & 'me'"},
        {"role": "assistant", "content": "ünï", "tool_calls": [{"name": "f", "arguments": {"x": 1, "y": [1.5, None]}}]},
    ],
    "n": 5,
    "s": "text",
    "none_value": None,
    "nested": {"a": {"b": ["x", "y"]}},
}


def render(source):
    try:
        text = compile_template(source).render(**copy.deepcopy(CONTEXT))
        text.encode()
        return text
    except Exception:
        return 0


ANY = [
    "undef", "none", "true", "0", "-7", "10**20", "3.5", "-0.0", "1e16", "1e-5", "2.0", "''", "'hello World'",
    "\"it's <b>\"", "'Ünï ß ǅ λΣ'", "' a\\tb\\n\\nc '", "'12'", "'-3.7e2'", "'0x1F'", "'日本語 x'", "[]", "[3, 1, 2]",
    "['b', 'A', 'c', 'a']", "[1, [2, [3]], none, undef]", "[{'n': 1, 's': 'B'}, {'n': 0, 's': 'a'}, {'n': 1}]",
    "[('x', 1), ('y', 2)]", "{}", "{'b': 1, 'A': 2, 'c': none}", "{'a': {'b': [1, 2]}, 1: 'one', (1, 2): true}", "('x',)",
    "('q', \"'\", '\\\\', '\\x00\\x7f\\xa0\\u200b\\U0001f600')", "range(3)", "namespace(a=1, b='x')", "'<'|e", "messages[0]",
]
TEXTS = [
    "''", "'hello World'", "'aXbXXc'", "' \\t pad\\n '", "'Ünï ß ǅ λΣ'", "'one\\r\\ntwo\\x0bthree\\u2028four\\n'", "'-42'",
    "'日本語'", "'they\\'re Bill\\'s 2nd friends'", "'a.b.c'", "'AbC dEf'", "'x1_y'",
]
LISTS = ["[]", "[1, 2, 1]", "['a', [1], none]", "(1, 2.0, true)", "()"]
DICTS = ["{}", "{'a': 1, 'b': none}", "{1: 'x', 'items': 5, none: 2}"]
NUMBERS = ["0", "-13", "255", "true", "2.5", "-0.0", "1e300", "7.0"]

# Arguments of filters; those without an entry have none.
FILTER_ARGUMENTS = {
    "attr": ["('a')", "('items')", "('upper')"],
    "batch": ["(2)|list", "(2, '-')|list", "(3, fill_with=0)|list"],
    "center": ["", "(9)", "(width=4)", "(-1)"],
    "d": ["", "('x')", "('x', true)", "('x', boolean=true)", "(default_value=1)"],
    "default": ["", "('x')", "('x', true)", "('x', boolean=true)", "(none)"],
    "dictsort": ["", "(true)", "(by='value')", "(reverse=true)", "(false, 'key', true)"],
    "filesizeformat": ["", "(true)"],
    "float": ["", "(1.5)", "(default=none)"],
    "format": ["", "(1)", "('a', 'b')", "(x=1)"],
    "groupby": ["('n')", "('n', default=9)", "(attribute='s', default='')", "(0)"],
    "indent": ["", "(2)", "(2, true)", "(width='>', first=true, blank=true)", "(1, blank=true)"],
    "int": ["", "(7)", "(default=-1)", "(0, 16)", "(0, base=0)"],
    "items": ["|list", "|length"],
    "join": ["", "('-')", "(', ', attribute='n')", "(d=1)", "('|', 's')", "(attribute=0)"],
    "list": ["", "|length"],
    "map": ["('upper')|list", "(attribute='n')|list", "(attribute='s', default='?')|list", "('default', 'x')|list",
            "('length')|list", "|list", "(attribute='b.0')|list", "('int', default=4)|list"],
    "max": ["", "(attribute='n')", "(case_sensitive=true)"],
    "min": ["", "(attribute='n')", "(true)"],
    "reject": ["|list", "('none')|list", "('equalto', 1)|list", "('in', [1, 'b'])|list"],
    "rejectattr": ["('n')|list", "('s', 'defined')|list", "('n', 'equalto', 1)|list", "|list"],
    "select": ["|list", "('string')|list", "('gt', 1)|list", "('odd')|list", "('defined')|first"],
    "selectattr": ["('n')|list", "('s', 'defined')|list", "('n', '==', 1)|list", "('role', 'equalto', 'user')|list"],
    "replace": ["('l', 'L')", "('l', 'L', 1)", "('', '.')", "('b', 'bb', count=0)", "(1, 2)", "('X')", "('a', none)"],
    "reverse": ["", "|list", "|first", "|join"],
    "round": ["", "(1)", "(0, 'floor')", "(method='ceil')", "(2, 'common')", "(-1)", "(0, 'x')"],
    "slice": ["(2)|list", "(2, '-')|list", "(5, fill_with=0)|list"],
    "sort": ["", "(true)", "(attribute='n')", "(case_sensitive=true)", "(reverse=true, attribute='n,s')"],
    "sum": ["", "(attribute='n')", "(start=10)", "('n', 1)"],
    "tojson": ["", "(indent=2)", "(ensure_ascii=true)", "(separators=(',', ':'))", "(sort_keys=true)", "(true, 1)",
               "(indent='>')", "(indent=0)"],
    "trim": ["", "('x')", "(' h')", "(chars='d')", "(none)"],
    "truncate": ["", "(5)", "(5, true)", "(5, end='>', leeway=0)", "(3, leeway=9)"],
    "unique": ["|list", "(true)|list", "(attribute='n')|list"],
    "urlencode": [""],
    "wordwrap": ["", "(3)"],
    "xmlattr": [""],
    "random": ["|string|length"],
    "pprint": [""],
}
TEST_ARGUMENTS = {name: ["(1)", "('b')", "([1, 'b'])"] for name in
                  ["==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le", ">", "gt", "greaterthan", ">=", "ge"]}
TEST_ARGUMENTS |= {
    "divisibleby": ["(3)", " 2", "(0)"],
    "in": ["([1, 'b', none])", "('hello World')", "({'A': 1})", "(5)"],
    "sameas": ["(none)", "(true)", "(0)", "(2.5)"],
}
METHOD_ARGUMENTS = {
    "str": {
        "center": ["(9)", "(9, '*')", "(-1)"], "ljust": ["(9)", "(9, '*')"], "rjust": ["(9)", "(9, '日')"],
        "count": ["('X')", "('')", "('b', 2)", "('b', -4, 5)"], "encode": ["()"], "endswith": ["('c')", "(('c', ' '))", "('', 2)", "('b', 0, -1)"],
        "startswith": ["('a')", "(('h', ' '))", "('X', 1)", "('l', 2, -1)", "(1)"], "expandtabs": ["()", "(3)", "(tabsize=0)"],
        "find": ["('X')", "('o', 5)", "('', 1)", "('c', -3)"], "rfind": ["('X')", "('o', 0, 6)"], "index": ["('X')", "('b')"], "rindex": ["('X')"],
        "format": ["()", "(1)"], "format_map": ["({})"], "join": ["(['a', 'b'])", "('xyz')", "([1])", "(())", "({'k': 1})"],
        "partition": ["('X')", "('b')", "('')"], "rpartition": ["('X')", "('b')"], "removeprefix": ["('a')", "('hello')", "('')"], "removesuffix": ["('c')", "('World')"],
        "replace": ["('X', '-')", "('X', '-', 1)", "('', '_')", "('', '_', 2)", "('l', 'LL', -1)"],
        "split": ["()", "('X')", "(' ')", "('X', 1)", "(none, 1)", "(maxsplit=1)", "(sep='.', maxsplit=1)", "('')"],
        "rsplit": ["()", "('X', 1)", "(none, 1)", "('.')", "(maxsplit=0)"], "splitlines": ["()", "(true)", "(keepends=true)"],
        "strip": ["()", "('ac')", "(none)"], "lstrip": ["()", "('aXh')"], "rstrip": ["()", "('cd\\n ')"],
        "zfill": ["(6)", "(2)"], "translate": ["({97: 'b'})"], "maketrans": ["('a', 'b')"],
    },
    "list": {"count": ["(1)", "(none)"], "index": ["(1)", "(none)", "(1, 1)", "(2, 0, 1)"], "append": ["(1)"], "insert": ["(0, 1)"], "extend": ["([1])"], "remove": ["(1)"]},
    "tuple": {"count": ["(1)"], "index": ["(1)", "(2, 1)"]},
    "dict": {"get": ["('a')", "('zz')", "('zz', 'd')", "(1)", "(none, 0)", "([1])"], "fromkeys": ["('ab')", "([1, 2], 0)"], "update": ["({})"], "pop": ["('a')"], "setdefault": ["('a')"],
             "items": ["()", "()|list", "()|length"], "keys": ["()", "()|list", "()|join"], "values": ["()", "()|list", "()|sum"]},
    "int": {}, "float": {"fromhex": ["('0x1p3')"]}, "range": {"count": ["(1)"], "index": ["(3)"]},
}
BINARY = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or"]
OPERANDS = ["undef", "none", "true", "0", "3", "-7", "2.5", "-0.5", "'a'", "'ab'", "'%s|'", "[]", "[1]", "('a', 2)", "{'a': 1}", "range(4)", "'<'|e"]

EXPRESSIONS = open(__file__.replace("make_jinja.py", "jinja_cases.txt"), encoding="utf-8").read().split("\n=====\n")


def group(name, forms, values):
    return {
        "name": name,
        "forms": forms,
        "values": values,
        "results": [[render("{% set v = " + value + " %}" + form) for value in values] for form in forms],
    }


def main():
    groups = []
    for name in sorted(ENV.filters):
        groups.append(group(f"filter {name}", ["{{ v|" + name + a + " }}" for a in FILTER_ARGUMENTS.get(name, [""])], ANY))
    for name in sorted(ENV.tests):
        if name.isidentifier():
            forms = ["{{ v is " + name + a + " }}" for a in TEST_ARGUMENTS.get(name, [""])]
        else:
            forms = ["{{ [v]|select('" + name + "', " + a[1:] + "|list }}" for a in TEST_ARGUMENTS[name]]
        groups.append(group(f"test {name}", forms, ANY))
    samples = {"str": TEXTS, "list": LISTS[:3], "tuple": LISTS[3:], "dict": DICTS, "int": NUMBERS[:4], "float": NUMBERS[4:], "range": ["range(5)", "range(9, 0, -2)"]}
    for kind in [str, list, tuple, dict, int, float, range]:
        for name in sorted(n for n in dir(kind) if not n.startswith("_")):
            value = getattr(kind, name)
            arguments = METHOD_ARGUMENTS[kind.__name__].get(name, ["()"]) if callable(value) else [""]
            forms = ["{{ v." + name + a + " }}" for a in arguments]
            groups.append(group(f"{kind.__name__}.{name}", forms, samples[kind.__name__]))
    for op in BINARY:
        forms = ["{{ v " + op + " " + (operand if "|" not in operand else f"({operand})") + " }}" for operand in OPERANDS]
        groups.append(group(f"operator {op}", forms, OPERANDS))
    groups.append(group("printing", ["{{ v }}", "{{ [v] }}", "{{ {1: v} }}", "{{ v ~ '' }}", "{{ 'y' if v else 'n' }}", "{{ not v }}", "{{ -v }}", "{{ +v }}", "{{ v|string|length }}"], ANY))
    groups.append(group("items", ["{{ v" + i + " }}" for i in ["[0]", "[-1]", "[9]", "['a']", ".a", ".b", "[1:]", "[:-1]", "[::-1]", "[::2]", "[5:1:-1]", "[-2:]", "[none:1]", "[true]", "['items']", ".0", "[1.0]", "[(1, 2)]", "[[1]]", "[undef]"]], ANY))
    groups.append(group("loops", ["{% for x in v %}[{{ x }}]{% else %}empty{% endfor %}", "{% for a, b in v %}{{ a }}={{ b }};{% endfor %}", "{% for x in v|list %}{{ loop.index }}{{ loop.last }}{{ loop.revindex0 }}{% endfor %}"], ANY))
    print(json.dumps({
        "versions": {"jinja2": jinja2.__version__, "transformers": transformers.__version__, "python": ".".join(map(str, sys.version_info[:2]))},
        "filters": sorted(ENV.filters), "tests": sorted(ENV.tests), "globals": sorted(ENV.globals),
        "context": CONTEXT,
    }, ensure_ascii=False)[:-1] + ',\n"groups": [')
    print(",\n".join(json.dumps(g, ensure_ascii=False, separators=(",", ":")) for g in groups))
    print('],\n"templates": [')
    print(",\n".join(json.dumps([source, render(source)], ensure_ascii=False, separators=(",", ":")) for source in EXPRESSIONS))
    print("]}")


main()
