//! `ft explain`: the cause and the remedy of an error, by its code.

use super::codes::{self, CODES, ErrorCode};
use super::out::{out, out_text};
use crate::base::{Error, Result};
use crate::recipe::suggest;
use serde_json::json;

/// Explain the code of an error
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft explain FT601
  ft explain              all codes

The last line of an error has its code. docs/troubleshooting.md has the same texts; pages in docs/ are part of the
source of ft.")]
pub struct Args {
    /// The code, such as FT601 [default: list all]
    #[arg(add = super::completions::code())]
    code: Option<String>,
    /// Print JSON, one object per code
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<i32> {
    let shown: Vec<&ErrorCode> = match &args.code {
        Some(typed) => vec![codes::find(typed).ok_or_else(|| unknown(typed))?],
        None => CODES.iter().collect(),
    };
    for code in shown {
        let ErrorCode {
            code,
            title,
            cause,
            remedy,
            ..
        } = code;
        if args.json {
            out(json!({"code": code, "title": title, "cause": cause, "remedy": remedy}))?;
        } else if args.code.is_none() {
            out(format!("{code}  {title}"))?;
        } else {
            out_text(format!("{code}: {title}\n\n{cause}\n\n{remedy}"))?;
        }
    }
    Ok(0)
}

fn unknown(typed: &str) -> Error {
    let error = Error::usage(format!("there is no code `{typed}`")).expected("a code such as FT601");
    let near = suggest::nearest(&typed.to_uppercase(), CODES.iter().map(|c| c.code));
    error.hint(match near {
        Some(near) => format!("did you mean `{near}`? `ft explain` lists all codes"),
        None => "`ft explain` lists all codes".into(),
    })
}

/// The table of codes in `docs/troubleshooting.md`.
#[cfg(test)]
fn page() -> String {
    let rows = CODES.iter().map(|c| {
        let cell = |text: &str| text.replace('|', "\\|");
        format!(
            "| {} | {} | {} | {} |\n",
            c.code,
            cell(c.title),
            cell(c.cause),
            cell(c.remedy)
        )
    });
    let head = "| code | error | cause | remedy |\n|---|---|---|---|\n";
    std::iter::once(head.to_string()).chain(rows).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::files;
    use std::path::Path;

    const BEGIN: &str = "<!-- the codes: FT_BLESS=1 cargo test --lib explain -->\n\n";
    const END: &str = "\n<!-- end of the codes -->\n";

    #[test]
    fn the_page_has_all_codes() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/troubleshooting.md");
        let text = files::read_text(&path).unwrap();
        let (before, rest) = text.split_once(BEGIN).unwrap();
        let (kept, after) = rest.split_once(END).unwrap();
        let now = page();
        if std::env::var_os("FT_BLESS").is_some() {
            files::write_atomic(&path, format!("{before}{BEGIN}{now}{END}{after}").as_bytes()).unwrap();
        } else {
            assert!(
                kept == now,
                "docs/troubleshooting.md is stale: run `FT_BLESS=1 cargo test`"
            );
        }
    }
}
