//! The files of the page, and the page as one file with the runs in it.

use super::view::{self, inside_markup};
use crate::base::{Error, Result, files};
use crate::history;
use serde_json::json;
use std::path::{Path, PathBuf};

pub const INDEX: &str = include_str!("page/index.html");
pub const STYLE: &str = include_str!("page/style.css");
pub const CHARTS: &str = include_str!("page/charts.js");
pub const TABS: &str = include_str!("page/tabs.js");
pub const PAGE: &str = include_str!("page/page.js");

/// Most runs that the page compares.
pub const MOST_RUNS: usize = 8;

/// The files that a served page loads, by the element that names them.
const PARTS: [(&str, &str, &str); 4] = [
    ("<link rel=\"stylesheet\" href=\"style.css\">", "style", STYLE),
    ("<script src=\"charts.js\"></script>", "script", CHARTS),
    ("<script src=\"tabs.js\"></script>", "script", TABS),
    ("<script src=\"page.js\"></script>", "script", PAGE),
];

/// The place of the runs in a page that is not served.
const DATA: &str = "<!-- data -->";

/// Writes `index.html` to a directory: the page with these runs in it, for a browser without a server. Returns its path.
///
/// Errors: there are more than eight runs; no run can be read; the file cannot be written.
pub fn write_folder(places: &[PathBuf], out: &Path) -> Result<PathBuf> {
    let runs = history::find(places)?;
    if runs.is_empty() || runs.len() > MOST_RUNS {
        return Err(Error::usage("the page is written for a few runs")
            .at("--out")
            .found(format!("{} runs", runs.len()))
            .expected(format!("1 to {MOST_RUNS} runs"))
            .hint("name the run directories: `ft dash runs/a runs/b --out DIR`"));
    }
    let (mut views, mut errors) = (Vec::new(), Vec::new());
    for (id, run) in runs.iter().enumerate() {
        views.push(view::view(id, run).unwrap_or_else(|e| {
            let shown = view::unreadable(id, run, &e);
            errors.push(e);
            shown
        }));
    }
    // A damaged run does not hide the others.
    if errors.len() == runs.len()
        && let Some(e) = errors.into_iter().next()
    {
        return Err(e);
    }
    let data = inside_markup(&json!({ "runs": views }));
    let mut page = INDEX.to_string();
    for (element, name, text) in PARTS {
        page = page.replace(element, &format!("<{name}>{text}</{name}>"));
    }
    let data = format!("<script type=\"application/json\" id=\"data\">{data}</script>");
    let page = page.replacen(DATA, &data, 1);
    files::create_dir_all(out)?;
    let path = out.join("index.html");
    files::write_output(&path, page.as_bytes())?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_its_parts_and_nothing_of_the_network() {
        for (element, _, text) in PARTS {
            assert_eq!(INDEX.matches(element).count(), 1, "{element}");
            assert!(!text.contains("</script") && !text.contains("</style"));
            // Text of a run never becomes markup, and no code is made of text.
            for word in [
                "innerHTML",
                "outerHTML",
                "insertAdjacent",
                "document.write",
                "eval(",
                "new Function",
            ] {
                assert!(!text.contains(word), "{word}");
            }
        }
        assert_eq!(INDEX.matches(DATA).count(), 1);
        let all = [INDEX, STYLE, CHARTS, TABS, PAGE].concat();
        // The name of SVG elements is no address that is loaded.
        let addresses = all.replace("http://www.w3.org/2000/svg", "");
        assert!(!addresses.contains("http:") && !addresses.contains("https:") && !addresses.contains("@import"));
    }
}
