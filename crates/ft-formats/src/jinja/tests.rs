//! The output of jinja2, and templates that attack. `testdata/make_jinja.py` writes the output of jinja2.

use super::*;
use serde_json::Map;
use std::collections::BTreeMap;
use std::time::Duration;

#[path = "../testdata/hostile.rs"]
mod hostile;

#[path = "../testdata/costly.rs"]
mod costly;

const GOLDEN: &str = include_str!("../testdata/jinja.json");

fn render(source: &str, variables: &Map<String, Json>) -> Result<String, Fail> {
    let variables: Vec<(&str, &Json)> = variables.iter().map(|(k, v)| (&**k, v)).collect();
    let messages = variables
        .iter()
        .find(|(k, _)| *k == "messages")
        .and_then(|(_, v)| v.as_array());
    let messages: &[Json] = messages.map_or(&[], |list| list);
    let all: Vec<(&str, &Json)> = variables.iter().filter(|(k, _)| *k != "messages").copied().collect();
    let template = Template::parse(source)?;
    template
        .render(&all, messages, &[(messages.len(), false)])
        .remove(0)
        .map(|(text, _)| text)
}

fn text(source: &str) -> String {
    render(source, &Map::new()).unwrap_or_else(|e| panic!("{source}: {e}"))
}

fn error(source: &str) -> Fail {
    render(source, &Map::new()).expect_err(source)
}

/// How a case of the golden file comes out: `None` as under jinja2, else the reason for which it is refused.
#[track_caller]
fn compare(source: &str, wanted: &Json, context: &Map<String, Json>, wrong: &mut Vec<String>) -> Option<String> {
    match (render(source, context), wanted.as_str()) {
        (Ok(got), Some(wanted)) if got == wanted => None,
        (Err(fail), Some(_)) if fail.kind == FailKind::Unsupported => Some(fail.text),
        // Any error will do where jinja2 has one.
        (Err(_), None) => None,
        (got, _) => {
            wrong.push(format!("{source}\n    jinja2 {wanted}\n    ft     {got:?}"));
            None
        }
    }
}

#[test]
fn every_filter_test_method_and_operator_prints_what_jinja2_prints() {
    let golden: Json = serde_json::from_str(GOLDEN).unwrap();
    let context = golden["context"].as_object().unwrap();
    let mut wrong = Vec::new();
    let mut refused: BTreeMap<String, (usize, usize, Vec<String>)> = BTreeMap::new();
    let mut count = 0;
    for group in golden["groups"].as_array().unwrap() {
        let name = group["name"].as_str().unwrap();
        let entry = refused.entry(name.to_string()).or_default();
        for (form, results) in group["forms"]
            .as_array()
            .unwrap()
            .iter()
            .zip(group["results"].as_array().unwrap())
        {
            for (value, result) in group["values"]
                .as_array()
                .unwrap()
                .iter()
                .zip(results.as_array().unwrap())
            {
                let source = format!("{{% set v = {} %}}{}", value.as_str().unwrap(), form.as_str().unwrap());
                count += 1;
                entry.1 += usize::from(result.is_string());
                if let Some(reason) = compare(&source, result, context, &mut wrong) {
                    entry.0 += 1;
                    if !entry.2.contains(&reason) {
                        entry.2.push(reason);
                    }
                }
            }
        }
    }
    for case in golden["templates"].as_array().unwrap() {
        count += 1;
        if let Some(reason) = compare(case[0].as_str().unwrap(), &case[1], context, &mut wrong) {
            // Of whole templates few are refused, each for what the table names.
            assert!(
                ["address", "surrogate", "generator"]
                    .iter()
                    .any(|word| reason.contains(word)),
                "{case}: {reason}"
            );
        }
    }
    assert!(count > 10_000, "{count}");
    assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n"));
    let known = |list: &str, names: &[&str]| {
        let golden: Vec<&str> = golden[list]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(Json::as_str)
            .collect();
        assert_eq!(golden, names, "{list}");
    };
    known("filters", &filters::NAMES);
    known("tests", &predicates::NAMES);
    let globals: Vec<&str> = functions::GLOBALS.into_iter().filter(|g| *g != "self").collect();
    known("globals", &globals);
    check_docs(&golden["versions"], &refused);
}

/// `docs/templates.md` holds the table of what is refused. `FT_BLESS=1` writes it.
fn check_docs(versions: &Json, refused: &BTreeMap<String, (usize, usize, Vec<String>)>) {
    const BEGIN: &str = "<!-- the table: made by the tests -->\n";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/templates.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (head, _) = page.split_once(BEGIN).expect("docs/templates.md has no table");
    let mut table = format!(
        "\nCompared with jinja2 {}, transformers {}, Python {}. Not listed: every case is the same.\n\n\
         | what | same | refused | because of |\n|---|---|---|---|\n",
        versions["jinja2"].as_str().unwrap(),
        versions["transformers"].as_str().unwrap(),
        versions["python"].as_str().unwrap()
    );
    for (name, (cases, all, reasons)) in refused.iter().filter(|(_, (cases, ..))| *cases > 0) {
        let reasons: Vec<String> = reasons.iter().map(|r| r.replace('|', "\\|")).collect();
        table.push_str(&format!(
            "| {} | {} | {cases} | {} |\n",
            name.replace('|', "\\|"),
            all - cases,
            reasons.join("; ")
        ));
    }
    let made = format!("{head}{BEGIN}{table}");
    if std::env::var_os("FT_BLESS").is_some() {
        std::fs::write(path, made).unwrap();
    } else {
        assert!(
            made == page,
            "docs/templates.md is old: FT_BLESS=1 cargo test --lib jinja"
        );
    }
}

/// Row D8.
/// On the development machine each takes less than half a second in a release build: the work that is counted is the
/// work that is done.
#[test]
fn no_template_hangs_or_takes_all_memory_or_stack() {
    let limit = Duration::from_secs(if cfg!(debug_assertions) { 60 } else { 5 });
    for (name, source) in hostile::templates().into_iter().chain(costly::templates()) {
        // In a thread, which one that hangs does not take along.
        let (send, receive) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let _ = send.send(render(&source, &Map::new()).map(|text| text.len()));
        });
        match receive.recv_timeout(limit) {
            Ok(Ok(length)) => assert!(length <= LONGEST, "{name}: {length}"),
            Ok(Err(fail)) => assert_ne!(fail.text, "", "{name}"),
            Err(e) => panic!("{name}: {e} after {limit:?}"),
        }
        thread.join().unwrap();
    }
}

#[test]
fn limits_are_errors_of_their_kind() {
    for source in [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(1000) %}{% set ns.x = [ns.x] %}{% endfor %}",
    ] {
        assert_eq!(error(source).kind, FailKind::Limit, "{source}");
    }
    // A limit of one text, and honest use below it.
    assert_eq!(text("{% set s = 'x' * 10000000 %}{{ (s ~ s)|length }}"), "20000000");
}

#[test]
fn errors_name_the_line() {
    assert_eq!(error("a\n\n{{ nothing.at.all }}").line, Some(3));
    assert_eq!(error("a\n{% for x in %}").line, Some(2));
    assert_eq!(
        error("{% if x %}\n{{ 1 + 'a' }}\n{% endif %}{{ undefined_function() }}").text,
        "'undefined_function' is undefined"
    );
    assert_eq!(error("{{ raise_exception('no') }}").kind, FailKind::Raised);
}

#[test]
fn what_the_documentation_names_as_refused_is_refused() {
    for source in [
        "{{ [0.1, 0.2]|sum }}",
        "{{ 'é٣'.isalnum() }}",
        "{{ '٣'|int }}",
        "{{ {'a': 1}.keys() - {'a': 1}.keys() }}",
        "{{ ('a'|safe).title() }}",
        "{{ ('<'|safe).replace('<', 'x') }}",
        "{{ '{:#.1}'.format(3.0) }}",
    ] {
        assert_eq!(error(source).kind, FailKind::Unsupported, "{source}");
    }
}

#[test]
fn json_integers_of_more_than_64_bits_and_minus_zero_are_floats() {
    let numbers: Json =
        serde_json::from_str(r#"{"a": [18446744073709551615, 18446744073709551616, -0, -0.0]}"#).unwrap();
    let printed = render("{{ a }}", numbers.as_object().unwrap()).unwrap();
    assert_eq!(printed, "[18446744073709551615, 1.8446744073709552e+19, -0.0, -0.0]");
}

#[test]
fn generation_blocks_in_macros_are_found() {
    let ranges = |source: &str| {
        let template = Template::parse(source).unwrap();
        assert!(template.marks_generation());
        let (text, ranges) = template.render(&[], &[], &[(0, false)]).remove(0).unwrap();
        let parts: Vec<String> = ranges.iter().map(|r| text[r.clone()].to_string()).collect();
        (text, parts)
    };
    let (text, parts) =
        ranges("{% macro m(x) %}[{% generation %}{{ x }}{% endgeneration %}]{% endmacro %}a{{ m(1) }}{{ m('ü') }}b");
    assert_eq!((text.as_str(), parts), ("a[1][ü]b", vec!["1".to_string(), "ü".into()]));
    let (text, parts) = ranges("{% set t %}a{% generation %} b {% endgeneration %}{% endset %}{{ t|trim }}");
    assert_eq!((text.as_str(), parts.len()), ("a b", 0));
    let (text, parts) = ranges("x{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}");
    assert_eq!((text.as_str(), parts), ("xab", vec!["ab".to_string(), "b".into()]));
}
