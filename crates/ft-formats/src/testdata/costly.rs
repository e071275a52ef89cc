//! Templates of single operations that cost more than they seem to: each has to be accounted for by what it does.

pub(super) fn templates() -> Vec<(&'static str, String)> {
    let plain = [
        (
            "tree of iterators",
            "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x]|select %}{% endfor %}",
        ),
        (
            "tree of cyclers",
            "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = cycler(ns.x, ns.x) %}{% endfor %}",
        ),
        (
            "kept iterator",
            "{% set it = range(100000)|map('string') %}{% for i in range(100000) %}{% for j in range(100000) %}{% set x = [it] %}{% endfor %}{% endfor %}",
        ),
        (
            "int of digits",
            "{% set s = '1' * 10000000 %}{% for i in range(100000) %}{% set x = s|int(-1, 0) %}{% endfor %}",
        ),
        (
            "float of digits",
            "{% set s = '1' * 10000000 %}{% for i in range(100000) %}{% set x = s|float %}{% endfor %}",
        ),
        ("json of controls", "{{ ('\\x01' * 60000000)|tojson }}"),
        ("repr of controls", "{% set s = '\\x01' * 16000000 %}{{ [s] }}"),
        ("json ascii", "{{ ('ä' * 30000000)|tojson(ensure_ascii=true) }}"),
        ("urlencode", "{{ ('ä' * 30000000)|urlencode }}"),
        ("escape in a sum", "{% set s = '<' * 40000000 %}{{ (''|safe) + s }}"),
        (
            "truncate with a long end",
            "{% set s = 'x' * 60000000 %}{% for i in range(100000) %}{% set x = 'x'|truncate(60000000, end=s) %}{% endfor %}",
        ),
        (
            "long needle in",
            "{% set s = 'x' * 30000000 %}{% for i in range(100000) %}{% set x = s in 'xy' %}{% endfor %}",
        ),
        (
            "long needle find",
            "{% set s = 'x' * 30000000 %}{% for i in range(100000) %}{% set x = 'xy'.find(s) %}{% endfor %}",
        ),
        (
            "long needle replace",
            "{% set s = 'x' * 30000000 %}{% for i in range(100000) %}{% set x = 'xy'|replace(s, '') %}{% endfor %}",
        ),
        (
            "long needle split",
            "{% set s = 'x' * 30000000 %}{% for i in range(100000) %}{% set x = 'xy'.split(s) %}{% endfor %}",
        ),
        (
            "nearly found",
            "{% set s = 'x' * 1000000 %}{% set n = 'x' * 1000 ~ 'y' ~ 'x' * 1000 %}{% for i in range(100000) %}{% set x = n in s %}{% set y = s.rfind(n) %}{% endfor %}",
        ),
        (
            "many starts",
            "{% set s = 'x' * 1000000 %}{% set t = s[1:] ~ 'y' %}{% set l = (t,) * 100000 %}{% for i in range(100000) %}{% set x = s.startswith(l) %}{% endfor %}",
        ),
        (
            "keyword arguments",
            "{% macro f() %}{{ kwargs|length }}{% endmacro %}{% set d = dict.fromkeys(range(100000)|map('string')) %}{% for i in range(100000) %}{% set x = f(**d) %}{% endfor %}",
        ),
        (
            "format_map",
            "{% set d = dict.fromkeys(range(30000)|map('string')|map('replace', '', 'a', 1)) %}{% set s = '{a29999}' * 1000000 %}{% for i in range(100000) %}{% set x = s.format_map(d) %}{% endfor %}",
        ),
        (
            "map with arguments",
            "{{ range(100000)|map('default', *range(100000))|list|length }}",
        ),
        (
            "attribute path",
            "{% set p = 'a.' * 1000000 ~ 'a' %}{{ range(100000)|map(attribute=p, default={})|list|length }}",
        ),
        (
            "sort by many",
            "{% set p = 'a,' * 1000000 ~ 'a' %}{{ ([{'a': 1}] * 100000)|sort(attribute=p)|length }}",
        ),
        (
            "long item",
            "{% set k = 'x' * 1000000 %}{% set d = dict.fromkeys(range(20)) %}{% for i in range(100000) %}{% set x = d[k] %}{% endfor %}",
        ),
        ("fields", "{{ ('{0}' * 16000000).format(1) }}"),
        (
            "digits",
            "{% set s = '%.1000f' * 100000 %}{{ s % ((1e300,) * 100000) }}",
        ),
        (
            "equal hashes",
            "{% set n = 'nan'|float %}{% for i in range(100000) %}{% set d = dict.fromkeys([n] * 100000) %}{% endfor %}",
        ),
        (
            "rsplit",
            "{% set s = 'x,' * 10000000 %}{% for i in range(100000) %}{% set x = s.rsplit(',', 100000000) %}{% endfor %}",
        ),
        (
            "rsplit words",
            "{% set s = 'x ' * 10000000 %}{% for i in range(100000) %}{% set x = s.rsplit(none, 100000000) %}{% endfor %}",
        ),
        (
            "indented lines",
            "{% set s = '\\n' * 20000000 %}{% for i in range(100000) %}{% set x = s|indent(0) %}{% endfor %}",
        ),
        (
            "groupby",
            "{% set l = range(100000)|list %}{% for i in range(100000) %}{% set x = l|groupby('real')|list %}{% endfor %}",
        ),
        (
            "unique",
            "{% set l = range(100000)|list %}{% for i in range(100000) %}{% set x = l|unique|list %}{% endfor %}",
        ),
        (
            "least",
            "{% set l = range(100000)|map('string')|list %}{% for i in range(100000) %}{% set x = l|min %}{% endfor %}",
        ),
        (
            "dictsort",
            "{% set d = dict.fromkeys(range(100000)) %}{% for i in range(100000) %}{% set x = d|dictsort %}{% endfor %}",
        ),
        (
            "sorted JSON",
            "{% set d = dict.fromkeys(range(100000)) %}{% for i in range(100000) %}{% set x = d|tojson(sort_keys=true) %}{% endfor %}",
        ),
        (
            "case",
            "{% set s = 'İ' * 5000000 %}{% for i in range(100000) %}{% set x = s.title() ~ s.swapcase() ~ s.lower() %}{% endfor %}",
        ),
        (
            "joined attributes",
            "{% set l = [{'a': 1}] * 100000 %}{% for i in range(100000) %}{% set x = l|join(attribute='a') %}{% endfor %}",
        ),
        (
            "selected",
            "{% set l = range(100000)|list %}{% for i in range(100000) %}{% set x = l|selectattr('real', 'divisibleby', 7)|list %}{% endfor %}",
        ),
        (
            "loop variables",
            "{% for i in range(100000) %}{% for j in range(100000)|map('string') %}{{ loop.last }}{{ loop.nextitem }}{{ loop.revindex }}{% endfor %}{% endfor %}",
        ),
        (
            "tuple of names",
            "{% for i in range(100000) %}{% for a, b in range(100000)|batch(2) %}{% endfor %}{% endfor %}",
        ),
    ];
    let mut out: Vec<(&str, String)> = plain.into_iter().map(|(name, text)| (name, text.to_string())).collect();
    let names: String = (0..50_000).map(|i| format!("{{% set v{i} = 1 %}}")).collect();
    // Templates whose cost depends on the number of names, or on their length.
    out.push((
        "hidden names",
        format!("{{% for i in range(100000) %}}{{% continue %}}{names}{{% endfor %}}"),
    ));
    out.push((
        "hidden names of macros",
        format!("{{% for i in range(100000) %}}{{% macro f() %}}{{% endmacro %}}{{% continue %}}{names}{{% endfor %}}"),
    ));
    out.push((
        "names of a loop",
        format!("{{% if 0 %}}{names}{{% endif %}}{{% for i in range(100000) %}}{{% for j in [1] %}}{{% endfor %}}{{% endfor %}}"),
    ));
    let branches: String = (0..25_000)
        .map(|i| format!("{{% set v{i} = 1 %}}{{% if 1 %}}{{% endif %}}"))
        .collect();
    out.push(("ifs between names", branches));
    let elifs: String = (0..25_000)
        .map(|i| format!("{{% elif 0 %}}{{% set v{i} = 1 %}}"))
        .collect();
    out.push(("elifs with names", format!("{{% if 0 %}}{elifs}{{% endif %}}")));
    let parameters: Vec<String> = (0..5_000).map(|i| format!("a{i}")).collect();
    let given: Vec<String> = (0..5_000).rev().map(|i| format!("a{i}=1")).collect();
    out.push((
        "parameters",
        format!(
            "{{% macro f({}) %}}{{% endmacro %}}{{% for i in range(100000) %}}{{% set x = f({}) %}}{{% endfor %}}",
            parameters.join(", "),
            given.join(", ")
        ),
    ));
    let long = "x".repeat(1_000_000);
    out.push((
        "long attribute",
        format!("{{% set d = dict.fromkeys(range(20)) %}}{{% for i in range(100000) %}}{{% set x = d.{long} %}}{{% endfor %}}"),
    ));
    out.push((
        "long macro",
        format!(
            "{{% macro {long}() %}}{{% endmacro %}}{{% for i in range(100000) %}}{{% set x = {long}() %}}{{% endfor %}}"
        ),
    ));
    out
}
