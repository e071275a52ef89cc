//! Numbers that a kernel and the code that launches it both state: "as in `cuda/NAME.cu`" above a constant of `ft-ops`, or
//! "as `C` in `cuda/NAME.cu`" if it has another name there. The compiler sees only one side of each.

use super::{Source, cuda, rust};
use std::collections::BTreeMap;

const KERNELS: &str = "crates/ft-kernels/cuda/";
const OPERATIONS: &str = "crates/ft-ops/src/";

/// The expressions of each name, as written.
type Constants = BTreeMap<String, Vec<String>>;

/// The `constexpr` values of a file of kernels.
fn of_kernels(text: &str) -> Constants {
    let mut found = Constants::new();
    for line in text.lines() {
        let line = line.split("//").next().unwrap_or_default();
        let Some((_, statement)) = line.split_once("constexpr ") else {
            continue;
        };
        let Some((_, list)) = statement.trim_end().trim_end_matches(';').split_once(' ') else {
            continue;
        };
        for part in list.split(',') {
            if let Some((name, value)) = part.split_once('=') {
                let name = name.trim().to_string();
                found.entry(name).or_default().push(value.trim().to_string());
            }
        }
    }
    found
}

/// The constants of a Rust file.
fn of_rust(text: &str) -> Constants {
    let mut found = Constants::new();
    for line in text.lines() {
        if let Some((name, value)) = constant(line) {
            found.entry(name.to_string()).or_default().push(value.to_string());
        }
    }
    found
}

/// Name and value of a line such as `pub(crate) const DOWN: usize = 8;`, if it is a number.
fn constant(line: &str) -> Option<(&str, &str)> {
    let (before, rest) = line.trim().split_once("const ")?;
    let (name, rest) = rest.split_once(": ")?;
    let (kind, value) = rest.split_once(" = ")?;
    let visible = before.is_empty() || before.starts_with("pub");
    (visible && ["usize", "u32", "i32", "u64"].contains(&kind)).then(|| (name, value.trim_end_matches(';')))
}

/// The value of an expression of integers and names; `None` if it contains anything else.
fn value(text: &str, name: &dyn Fn(&str) -> Option<u64>) -> Option<u64> {
    let text = text.replace(" as u32", "").replace(" as usize", "");
    let mut tokens = Vec::new();
    let mut rest = text.trim();
    while let Some(first) = rest.chars().next() {
        let word = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        let len = if word(first) {
            rest.find(|c| !word(c)).unwrap_or(rest.len())
        } else {
            first.len_utf8()
        };
        tokens.push(&rest[..len]);
        rest = rest[len..].trim_start();
    }
    let mut at = 0;
    let sum = sum(&tokens, &mut at, name)?;
    (at == tokens.len()).then_some(sum)
}

fn sum(tokens: &[&str], at: &mut usize, name: &dyn Fn(&str) -> Option<u64>) -> Option<u64> {
    let mut sum = product(tokens, at, name)?;
    while let Some(sign @ (&"+" | &"-")) = tokens.get(*at) {
        *at += 1;
        let next = product(tokens, at, name)?;
        sum = if *sign == "+" {
            sum + next
        } else {
            sum.checked_sub(next)?
        };
    }
    Some(sum)
}

fn product(tokens: &[&str], at: &mut usize, name: &dyn Fn(&str) -> Option<u64>) -> Option<u64> {
    let mut product = single(tokens, at, name)?;
    while let Some(sign @ (&"*" | &"/")) = tokens.get(*at) {
        *at += 1;
        let next = single(tokens, at, name)?;
        product = if *sign == "*" {
            product * next
        } else {
            product.checked_div(next)?
        };
    }
    Some(product)
}

fn single(tokens: &[&str], at: &mut usize, name: &dyn Fn(&str) -> Option<u64>) -> Option<u64> {
    let token = *tokens.get(*at)?;
    *at += 1;
    if token == "(" {
        let inner = sum(tokens, at, name)?;
        *at += 1;
        return (tokens.get(*at - 1) == Some(&")")).then_some(inner);
    }
    let digits = token.replace('_', "");
    let digits = digits.trim_end_matches(['u', 'U']);
    match digits.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None if token == "u32::MAX" => Some(u64::from(u32::MAX)),
        None if digits.starts_with(|c: char| c.is_ascii_digit()) => digits.parse().ok(),
        None => name(token),
    }
}

/// The value of a name that is defined once.
fn of(constants: &Constants, elsewhere: &dyn Fn(&str) -> Option<u64>, name: &str) -> Option<u64> {
    match constants.get(name).map(Vec::as_slice) {
        Some([only]) => value(only, &|name| of(constants, elsewhere, name)),
        Some(_) => None,
        None => elsewhere(name),
    }
}

/// The file of kernels that a comment names, and the name there, if it says so: "as `C` in `cuda/NAME.cu`".
fn named(comment: &str) -> Option<(&str, Option<&str>)> {
    let (before, file) = comment.split_once("in `cuda/")?;
    let file = file.split('`').next()?;
    if before.ends_with("as ") {
        return Some((file, None));
    }
    let name = before.strip_suffix("` ")?.rsplit_once("as `")?.1;
    Some((file, Some(name)))
}

fn text_of(sources: &[Source], path: &str) -> String {
    let found = sources.iter().find(|source| source.path == path);
    found.unwrap_or_else(|| panic!("no file {path}")).text.clone()
}

#[test]
fn constants_of_kernels_are_those_of_their_launches() {
    let (sources, kernels) = (rust(&[OPERATIONS]), cuda());
    let all: Vec<Constants> = sources.iter().map(|source| of_rust(&source.text)).collect();
    // A number that another file exports: `DEVICE_KEY as KEY`.
    let exported = |name: &str| {
        let found = all
            .iter()
            .find_map(|constants| constants.get(&format!("DEVICE_{name}")));
        value(&found?[0], &|_| None)
    };
    let (mut wrong, mut compared) = (Vec::new(), 0);
    for (Source { path, text }, constants) in sources.iter().zip(&all) {
        let mut comment = String::new();
        for line in text.lines() {
            if let Some(more) = line.trim().strip_prefix("///") {
                // The comment of a group ends with its first constant.
                if comment.ends_with('\n') {
                    comment.clear();
                }
                comment += more;
                continue;
            }
            let Some((name, _)) = constant(line) else {
                if !line.trim().starts_with("#[") {
                    comment.clear();
                }
                continue;
            };
            let Some((file, other)) = named(comment.trim_end_matches('\n')) else {
                continue;
            };
            let kernels = of_kernels(&text_of(&kernels, &format!("{KERNELS}{file}")));
            let own = of(constants, &exported, name);
            let theirs = of(&kernels, &|_| None, other.unwrap_or(name));
            if own.is_none() || own != theirs {
                wrong.push(format!("{path}: {name} is {own:?}, in {file} {theirs:?}"));
            }
            compared += 1;
            if !comment.ends_with('\n') {
                comment.push('\n');
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(compared >= COMPARED, "{compared}");
}

/// Constants with such a comment.
const COMPARED: usize = 30;

/// The arguments of the uses of a macro of kernels at the beginning of a line.
fn uses(text: &str, name: &str) -> Vec<Vec<String>> {
    let arguments = |line: &str| {
        let list = line.strip_prefix(name)?.strip_prefix('(')?.strip_suffix(')')?;
        Some(list.split(',').map(|x| x.trim().to_string()).collect())
    };
    text.lines().filter_map(arguments).collect()
}

#[test]
fn tiles_of_attention_are_those_that_are_compiled() {
    let all = cuda();
    let kernels = |name: &str| text_of(&all, &format!("{KERNELS}{name}.cu"));
    let (forward, backward) = (kernels("attention_forward"), kernels("attention_backward"));
    let number = |text: &String| text.parse::<usize>().unwrap();
    let of = |text: &str, name: &str, size: usize| {
        let uses = uses(text, name).into_iter();
        uses.filter(|list| number(&list[0]) == size)
            .map(|list| list[1..].to_vec())
            .collect::<Vec<_>>()
    };
    let launches = text_of(&rust(&[OPERATIONS]), &format!("{OPERATIONS}cuda/attention.rs"));
    let mut sizes = 0;
    for line in launches.lines().filter(|line| line.contains("KernelSet { size: ")) {
        let field = |name: &str| {
            let (_, rest) = line.split_once(&format!("{name}: ")).unwrap();
            rest.split([',', ' ']).next().unwrap().to_string()
        };
        let count = |name: &str| number(&field(name));
        let size = count("size");
        let [rows] = &of(&forward, "FORWARD", size)[..] else {
            panic!("{size}")
        };
        assert_eq!(
            [64 * number(&rows[0]), number(&rows[1])],
            [count(" queries"), count(" keys")]
        );
        let cached = of(&forward, "CACHED", size);
        assert_eq!(cached.len(), 2, "bf16 and int8");
        assert!(cached.iter().all(|list| number(&list[0]) == count("cached_keys")));
        let [list] = &of(&backward, "KEYS", size)[..] else {
            panic!("{size}")
        };
        let staged = number(&list[1]) * number(&list[2]);
        assert_eq!([number(&list[0]), staged], [count("columns"), count("staged_queries")]);
        assert_eq!(list[3], field("in_registers"));
        let [list] = &of(&backward, "QUERIES", size)[..] else {
            panic!("{size}")
        };
        assert_eq!(number(&list[0]) * number(&list[1]), count("staged_keys"));
        assert_eq!(list[2], field("in_registers"));
        sizes += 1;
    }
    assert_eq!(sizes, uses(&forward, "FORWARD").len());
    let plain: Vec<String> = uses(&kernels("attention_f32"), "PLAIN")
        .iter()
        .map(|list| format!("({})", list.join(", ")))
        .collect();
    assert!(launches.contains(&format!("[{}];", plain.join(", "))), "{plain:?}");
}

#[test]
fn another_value_is_found() {
    let kernels =
        of_kernels("constexpr int KEY = 128;  // of a head\nconstexpr int WIDE = KEY + 4, PITCH = (WIDE - 4) / 2;\n");
    let found = |name: &str| of(&kernels, &|_| None, name);
    assert_eq!(
        [found("WIDE"), found("PITCH"), found("NONE")],
        [Some(132), Some(64), None]
    );
    let rust = of_rust(
        "const NARROW: usize = CHUNK + 8;\nconst NAME: &str = \"x\";\npub(crate) const NONE: u32 = u32::MAX;\n",
    );
    let other = |name: &str| (name == "CHUNK").then_some(32);
    assert_eq!(of(&rust, &other, "NARROW"), Some(40));
    assert_eq!(of(&rust, &other, "NONE"), value("0xffffffffu", &|_| None));
    assert_eq!(of(&rust, &other, "NAME"), None);
    assert_eq!(
        named(" Same values as in `cuda/columns.cu`."),
        Some(("columns.cu", None))
    );
    assert_eq!(named(" Tokens, as `C` in `cuda/a.cuh`."), Some(("a.cuh", Some("C"))));
    assert_eq!(named(" Samples, see `cuda/sample.cu`."), None);
}
