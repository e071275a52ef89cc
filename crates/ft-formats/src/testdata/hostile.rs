//! Templates that try to hang, to use all memory or to overflow the stack. None may succeed.

pub(super) fn templates() -> Vec<(&'static str, String)> {
    let many = |piece: &str, n: usize| piece.repeat(n);
    let mut out: Vec<(&str, String)> = vec![
        // Stack of the parser.
        ("attributes", format!("{{{{ a{} }}}}", many(".a", 100_000))),
        ("indices", format!("{{{{ a{} }}}}", many("[0]", 100_000))),
        ("sums", format!("{{{{ 1{} }}}}", many("+1", 100_000))),
        ("products", format!("{{{{ 1{} }}}}", many("*1", 100_000))),
        ("powers", format!("{{{{ 1{} }}}}", many("**1", 100_000))),
        ("minuses", format!("{{{{ {}1 }}}}", many("-", 100_000))),
        ("nots", format!("{{{{ {}1 }}}}", many("not ", 100_000))),
        (
            "brackets",
            format!("{{{{ {}1{} }}}}", many("(", 100_000), many(")", 100_000)),
        ),
        (
            "lists",
            format!("{{{{ {}1{} }}}}", many("[", 100_000), many("]", 100_000)),
        ),
        (
            "dicts",
            format!("{{{{ {}1{} }}}}", many("{1:", 50_000), many("}", 50_000)),
        ),
        ("calls", format!("{{{{ a{} }}}}", many("()", 100_000))),
        (
            "nested calls",
            format!("{{{{ {}1{} }}}}", many("a(", 50_000), many(")", 50_000)),
        ),
        ("filters", format!("{{{{ 1{} }}}}", many("|string", 100_000))),
        ("tests", format!("{{{{ 1{} }}}}", many(" is odd", 50_000))),
        ("ands", format!("{{{{ 1{} }}}}", many(" and 1", 100_000))),
        ("ors", format!("{{{{ 1{} }}}}", many(" or 1", 100_000))),
        ("conditions", format!("{{{{ 1{} }}}}", many(" if 1 else 1", 50_000))),
        ("comparisons", format!("{{{{ 1{} }}}}", many(" < 1", 100_000))),
        ("joins", format!("{{{{ 1{} }}}}", many(" ~ 1", 100_000))),
        (
            "ifs",
            format!("{}{}", many("{% if 1 %}", 30_000), many("{% endif %}", 30_000)),
        ),
        (
            "fors",
            format!("{}{}", many("{% for x in 'a' %}", 20_000), many("{% endfor %}", 20_000)),
        ),
        (
            "withs",
            format!("{}{}", many("{% with %}", 30_000), many("{% endwith %}", 30_000)),
        ),
        (
            "elifs",
            format!("{{% if 0 %}}{}{{% endif %}}", many("{% elif 0 %}", 60_000)),
        ),
        (
            "targets",
            format!("{{% set {}a{} = 1 %}}", many("(", 100_000), many(")", 100_000)),
        ),
        (
            "generations",
            format!(
                "{}{}",
                many("{% generation %}", 20_000),
                many("{% endgeneration %}", 20_000)
            ),
        ),
        ("open brackets", format!("{{{{ {}", many("(", 500_000))),
        ("open raw", many("{% raw %}", 60_000)),
        ("open comments", many("{#", 500_000)),
        ("open strings", many("{{ '", 250_000)),
        ("slices", format!("{{{{ a{} }}}}", many("[1:]", 100_000))),
    ];
    let plain = [
        // Nested values.
        (
            "deep list",
            "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x == ns.x }}",
        ),
        (
            "deep dict",
            "{% set ns = namespace(x={}) %}{% for i in range(100000) %}{% set ns.x = {'a': ns.x} %}{% endfor %}{{ ns.x }}",
        ),
        (
            "deep tuple in",
            "{% set ns = namespace(x=()) %}{% for i in range(100000) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ ns.x in [ns.x] }}",
        ),
        (
            "deep joined",
            "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x ~ '' }}",
        ),
        (
            "deep iterators",
            "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x]|select %}{% endfor %}{{ ns.x|list }}",
        ),
        (
            "deep namespaces",
            "{% set ns = namespace(x=1) %}{% for i in range(100000) %}{% set ns.x = namespace(x=ns.x) %}{% endfor %}{{ ns }}",
        ),
        (
            "own namespace",
            "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns }}",
        ),
        (
            "kept loops",
            "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% for y in [ns.x] %}{% set ns.x = [loop] %}{% endfor %}{% endfor %}",
        ),
        (
            "loop in itself",
            "{% for i in range(100000) %}{% for y in [1] %}{{ loop.changed(loop) }}{% endfor %}{% endfor %}",
        ),
        (
            "deep views",
            "{% set ns = namespace(x={}) %}{% for i in range(100000) %}{% set ns.x = {1: ns.x.items()} %}{% endfor %}",
        ),
        (
            "deep cyclers",
            "{% set ns = namespace(x=1) %}{% for i in range(100000) %}{% set ns.x = cycler(ns.x) %}{% endfor %}",
        ),
        (
            "deep methods",
            "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x.index] %}{% endfor %}",
        ),
        (
            "wide tree",
            "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        ),
        (
            "wide tree ==",
            "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
        ),
        (
            "wide tree key",
            "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}",
        ),
        (
            "wide tree json",
            "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
        ),
        (
            "wide tree sort",
            "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ [ns.x, ns.x]|sort|length }}",
        ),
        // Memory.
        (
            "doubled text",
            "{% set ns = namespace(x='xx') %}{% for i in range(100) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        ),
        (
            "added text",
            "{% set ns = namespace(x='xx') %}{% for i in range(100) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        ),
        (
            "doubled list",
            "{% set ns = namespace(x=[1]) %}{% for i in range(100) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        ),
        (
            "many texts",
            "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = ns.x + ['x' * 10000000] %}{% endfor %}",
        ),
        (
            "doubled namespaces",
            "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% for j in range(100000) %}{% set q = namespace(a=1) %}{% endfor %}{% endfor %}",
        ),
        (
            "macros",
            "{% for i in range(100000) %}{% for j in range(100000) %}{% macro f() %}{% endmacro %}{% endfor %}{% endfor %}",
        ),
        ("times", "{{ 'x' * 10000000000 }}"),
        ("list times", "{{ [1] * 10000000000 }}"),
        ("huge times", "{{ 'x' * (10 ** 30) }}"),
        ("percent width", "{{ '%10000000000d' % 5 }}"),
        ("percent width filter", "{{ '%10000000000d'|format(5) }}"),
        ("percent star", "{{ '%*d' % (10000000000, 5) }}"),
        ("percent precision", "{{ '%.1000000000f' % 5 }}"),
        ("format width", "{{ '{:>10000000000}'.format('x') }}"),
        ("format nested width", "{{ '{:>{}}'.format('x', 10000000000) }}"),
        ("format precision", "{{ '{:.1000000000f}'.format(1.5) }}"),
        ("center", "{{ 'x'.center(10000000000) }}{{ 'x'|center(10000000000) }}"),
        ("ljust", "{{ 'x'.ljust(10000000000) }}"),
        ("rjust", "{{ 'x'.rjust(10000000000) }}"),
        ("zfill", "{{ 'x'.zfill(10000000000) }}"),
        ("expandtabs", "{{ ('\\t' * 1000000).expandtabs(10000000) }}"),
        ("indent", "{{ ('\\n' * 1000000)|indent(1000000, true, true) }}"),
        ("json indent", "{{ [[[1]]]|tojson(indent=10000000000) }}"),
        (
            "json separators",
            "{% set s = 'x' * 10000000 %}{{ range(1000)|list|tojson(separators=(s, s)) }}",
        ),
        ("batch", "{{ [1]|batch(10000000000, 'x')|list }}"),
        ("slice", "{{ [1]|slice(10000000000)|list }}"),
        ("replace", "{% set s = 'x' * 10000000 %}{{ s|replace('x', s) }}"),
        ("replace method", "{% set s = 'x' * 1000000 %}{{ s.replace('', s) }}"),
        ("join", "{% set s = 'x' * 10000000 %}{{ range(1000)|join(s) }}"),
        ("join method", "{% set s = 'x' * 10000000 %}{{ s.join('abcdefghijk') }}"),
        ("escape", "{{ ('<' * 60000000)|e|e|forceescape }}"),
        ("repr", "{{ ['\\x00' * 60000000] }}"),
        ("upper", "{{ ('ﬃ' * 20000000).upper() }}"),
        (
            "set block",
            "{% set s = 'x' * 60000000 %}{% set t %}{% for i in range(1000) %}{{ s }}{% endfor %}{% endset %}",
        ),
        (
            "printed",
            "{% set s = 'x' * 10000000 %}{% for i in range(1000) %}{{ s }}{% endfor %}",
        ),
        (
            "filter block",
            "{% filter upper %}{% for i in range(1000) %}{{ 'x' * 10000000 }}{% endfor %}{% endfilter %}",
        ),
        (
            "macro text",
            "{% macro f(n) %}{{ 'x' * 10000000 }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
        ),
        ("power", "{{ 10 ** 1000000000 }}"),
        ("shift", "{{ 2 ** (2 ** 62) }}"),
        ("big range", "{{ range(10 ** 20)|list }}"),
        (
            "big list",
            "{% set ns = namespace(x=[]) %}{% for i in range(1000) %}{% set ns.x = ns.x + range(100000)|list %}{% endfor %}",
        ),
        ("split", "{{ ('x,' * 20000000).split(',')|length }}"),
        ("letters", "{{ ('x' * 60000000)|list|length }}"),
        (
            "groups",
            "{% for i in range(100000) %}{% set x = range(100000)|list|map('string')|list|batch(1)|list %}{% endfor %}",
        ),
        // Time.
        (
            "nested loops",
            "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        ),
        (
            "length",
            "{% set s = 'ä' * 10000000 %}{% for i in range(100000) %}{% set n = s|length %}{% endfor %}",
        ),
        (
            "upper in a loop",
            "{% set s = 'x' * 10000000 %}{% for i in range(100000) %}{% set n = s|upper %}{% endfor %}",
        ),
        (
            "in list",
            "{% set l = range(100000)|list %}{% for i in range(100000) %}{% if -1 in l %}{% endif %}{% endfor %}",
        ),
        (
            "in text",
            "{% set s = 'x' * 10000000 %}{% for i in range(100000) %}{% if 'y' in s %}{% endif %}{% endfor %}",
        ),
        (
            "slices in a loop",
            "{% set s = 'ä' * 10000000 %}{% for i in range(100000) %}{% set t = s[1:] %}{% endfor %}",
        ),
        (
            "index in a loop",
            "{% set s = 'ä' * 10000000 %}{% for i in range(100000) %}{% set t = s[-1] %}{% endfor %}",
        ),
        (
            "equal texts",
            "{% set s = 'x' * 10000000 %}{% set t = 'x' * 10000000 %}{% for i in range(100000) %}{% if s == t %}{% endif %}{% endfor %}",
        ),
        (
            "less texts",
            "{% set s = 'x' * 10000000 %}{% set t = 'x' * 10000000 %}{% for i in range(100000) %}{% if s < t %}{% endif %}{% endfor %}",
        ),
        (
            "find",
            "{% set s = 'x' * 10000000 %}{% for i in range(100000) %}{% set n = s.find('y') %}{% endfor %}",
        ),
        (
            "count",
            "{% set s = 'x' * 10000000 %}{% for i in range(100000) %}{% set n = s.count('y') %}{% endfor %}",
        ),
        (
            "strip",
            "{% set s = ' ' * 10000000 %}{% for i in range(100000) %}{% set n = s.strip() %}{% endfor %}",
        ),
        (
            "strip set",
            "{% set s = 'x' * 1000000 %}{% for i in range(100000) %}{% set n = s.strip(s) %}{% endfor %}",
        ),
        (
            "strip far set",
            "{% set s = 'y' * 1000000 %}{% set c = 'x' * 1000000 ~ 'y' %}{{ s.strip(c) }}",
        ),
        (
            "isspace",
            "{% set s = ' ' * 10000000 %}{% for i in range(100000) %}{% set n = s.isspace() %}{% endfor %}",
        ),
        (
            "is lower",
            "{% set s = 'x' * 10000000 %}{% for i in range(100000) %}{% set n = s is lower %}{% endfor %}",
        ),
        (
            "sort",
            "{% set l = range(100000)|list %}{% for i in range(100000) %}{% set n = l|sort %}{% endfor %}",
        ),
        (
            "sort texts",
            "{% set l = [('x' * 10000000) ~ 'a', ('x' * 10000000) ~ 'b'] * 1000 %}{% set n = l|sort %}",
        ),
        (
            "unique texts",
            "{% set l = ['x' * 10000000] * 1000 %}{% for i in range(100000) %}{% set n = l|unique|list %}{% endfor %}",
        ),
        (
            "keys",
            "{% set k = 'x' * 10000000 %}{% set d = {k: 1} %}{% for i in range(100000) %}{% set n = d[k] %}{% endfor %}",
        ),
        (
            "json in a loop",
            "{% set l = range(100000)|list %}{% for i in range(100000) %}{% set n = l|tojson %}{% endfor %}",
        ),
        (
            "sum of lists",
            "{% set l = [[1] * 1000] * 1000 %}{% for i in range(100000) %}{% set n = l|sum(start=[]) %}{% endfor %}",
        ),
        (
            "range in",
            "{% for i in range(100000) %}{% if 99999 in range(100000) %}{% endif %}{% endfor %}",
        ),
        (
            "range texts",
            "{% for a in range(100000) %}{% set x = range(100000)|join %}{% endfor %}",
        ),
        (
            "last of range",
            "{% for a in range(100000) %}{% set x = range(100000)|last %}{% endfor %}",
        ),
        ("recursion", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
        (
            "two recursions",
            "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        ),
        (
            "bushy recursion",
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(80) }}",
        ),
        (
            "recursive loop",
            "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        ),
        (
            "caller recursion",
            "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{{ f() }}",
        ),
        (
            "strftime",
            "{% for i in range(100000) %}{% for j in range(100000) %}{% set x = strftime_now('%c') %}{% endfor %}{% endfor %}",
        ),
        (
            "formats",
            "{% set s = '{}' * 1000000 %}{% for i in range(100000) %}{% set x = s.format(*[1] * 1000000) %}{% endfor %}",
        ),
        (
            "percents",
            "{% set s = '%s' * 1000000 %}{% for i in range(100000) %}{% set x = s % ([1] * 1000000) %}{% endfor %}",
        ),
        (
            "lines",
            "{% set s = '\\n' * 10000000 %}{% for i in range(100000) %}{% set x = s.splitlines() %}{% endfor %}",
        ),
        (
            "words",
            "{% set s = ' x' * 10000000 %}{% for i in range(100000) %}{% set x = s.split() %}{% endfor %}",
        ),
        (
            "title",
            "{% set s = 'x ' * 10000000 %}{% for i in range(100000) %}{% set x = s|title %}{% endfor %}",
        ),
        (
            "truncate",
            "{% set s = 'x ' * 10000000 %}{% for i in range(100000) %}{% set x = s|truncate(9) %}{% endfor %}",
        ),
        (
            "wordcount",
            "{% set s = 'x ' * 10000000 %}{% for i in range(100000) %}{% set x = s|wordcount %}{% endfor %}",
        ),
        (
            "reverse",
            "{% set s = 'x' * 10000000 %}{% for i in range(100000) %}{% set x = s|reverse %}{% endfor %}",
        ),
        (
            "int",
            "{% set s = ' ' * 10000000 %}{% for i in range(100000) %}{% set x = s|int %}{% endfor %}",
        ),
        (
            "starts",
            "{% set s = 'x' * 10000000 %}{% for i in range(100000) %}{% set x = s.startswith(s, 1) %}{% endfor %}",
        ),
        (
            "macro arguments",
            "{% macro f() %}{{ varargs|length }}{% endmacro %}{% for i in range(100000) %}{% set x = f(*range(100000)) %}{% endfor %}",
        ),
        (
            "dicts in a loop",
            "{% for i in range(100000) %}{% set d = dict(range(100000)|batch(2)|list) %}{% endfor %}",
        ),
        (
            "views in a loop",
            "{% set d = dict.fromkeys(range(100000)) %}{% for i in range(100000) %}{% set x = d.items()|list %}{% endfor %}",
        ),
        (
            "equal dicts",
            "{% set d = dict.fromkeys(range(100000)) %}{% for i in range(100000) %}{% set x = d == d %}{% endfor %}",
        ),
        (
            "loop length",
            "{% for i in range(100000) %}{% for j in range(100000)|select %}{{ loop.length }}{% break %}{% endfor %}{% endfor %}",
        ),
        (
            "prefix",
            "{% set s = 'x' * 10000000 %}{% for i in range(100000) %}{% set x = s.removeprefix('x') %}{% endfor %}",
        ),
        (
            "copies",
            "{% set l = range(100000)|list %}{% for i in range(100000) %}{% set x = l.copy() %}{% endfor %}",
        ),
        (
            "names",
            "{% for i in range(100000) %}{% for j in range(100000) %}{{ nothing }}{% endfor %}{% endfor %}",
        ),
    ];
    out.extend(plain.into_iter().map(|(name, text)| (name, text.to_string())));
    let names: String = (0..50_000).map(|i| format!("{{% set v{i} = 1 %}}")).collect();
    out.push((
        "many names",
        format!("{names}{{% for i in range(100000) %}}{{{{ v49999 }}}}{{% endfor %}}"),
    ));
    out
}
