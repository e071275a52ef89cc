//! A source: files, how their rows are read, and their weight in a mixture. All rows of a run pass through `rows`.

use super::dataset::{EachRow, Origin};
use super::faults::BadRows;
use super::layout::{Layout, Purpose, Rules};
use super::mapping::{Mapped, Mapper, Mapping};
use super::mixture::Share;
pub use super::read::is_data_file;
use super::read::{self, Row, TextUnit};
use super::reading::Reading;
use crate::RowFormat;
use ft_base::{Error, Result};
use std::sync::Arc;

/// Files with rows of one kind.
#[derive(Debug, Clone, PartialEq)]
pub struct Source {
    /// The name of the source in reports.
    pub name: String,
    /// Paths of the files, in order.
    pub files: Vec<String>,
    /// Format of the rows; `Auto`: decided per file from its columns.
    pub format: RowFormat,
    /// Columns with other names than the usual ones.
    pub mapping: Mapping,
    /// The part of a text file that is a row.
    pub text_unit: TextUnit,
    /// The number of rows to read, from the first one; `None`: all.
    pub limit: Option<usize>,
    /// The share of this source in an epoch, in relation to the weights of the other sources. `None`: each row once.
    pub weight: Option<f64>,
}

impl Source {
    /// All rows of these files, with the usual columns.
    pub fn new(files: Vec<String>) -> Self {
        Self {
            name: files.join(", "),
            files,
            format: RowFormat::Auto,
            mapping: Mapping::default(),
            text_unit: TextUnit::Auto,
            limit: None,
            weight: None,
        }
    }
}

/// The path of a file, by its index over all sources.
pub(crate) fn file(sources: &[Source], index: u32) -> &str {
    let mut files = sources.iter().flat_map(|source| &source.files);
    files.nth(index as usize).map_or("", String::as_str)
}

/// The sources with the shares of their rows.
pub fn shares(sources: &[Source]) -> Vec<Share> {
    let share = |source: &Source| Share {
        name: source.name.clone(),
        files: source.files.len(),
        weight: source.weight,
        ..Share::default()
    };
    sources.iter().map(share).collect()
}

/// One file that is being read.
struct OpenFile {
    mapper: Mapper,
    layout: Arc<Layout>,
    reading: Reading,
}

impl OpenFile {
    /// Decides from the first row that is used. `None`: the row is skipped.
    fn new(source: &Source, row: &Row, purpose: Purpose, rules: &Rules) -> Result<Option<Self>> {
        let mapper = Mapper::new(&source.mapping, row, source.format, purpose, rules);
        let mapper = mapper.map_err(|e| e.or_at(&row.place))?;
        let Mapped::Row(row) = mapper.apply(row.clone())? else {
            return Ok(None);
        };
        let mut layout = Layout::find(&row, source.format, purpose, rules)?;
        mapper.complete(&mut layout).map_err(|e| e.or_at(&row.place))?;
        Ok(Some(Self {
            mapper,
            reading: Reading::new(&row.place.file, layout.clone(), &row),
            layout: Arc::new(layout),
        }))
    }

    fn row(&mut self, row: Row, file: u32, bad: &mut BadRows, each: &mut EachRow<'_>) -> Result<()> {
        let origin = Origin {
            file,
            number: row.place.number,
            is_line: row.place.is_line,
        };
        match self.mapper.apply(row) {
            Ok(Mapped::Row(row)) => {
                self.reading.see(&row);
                each(row, &self.layout, origin, bad)
            }
            Ok(Mapped::Skipped(why)) => {
                self.reading.skip(why);
                Ok(())
            }
            Err(e) => bad.add(e),
        }
    }
}

/// Ends the reading of a source that has a limit; never shown.
const ENOUGH: &str = "enough rows of this source";

/// Passes each row of the sources to `each` with its file's layout and its origin; broken rows go to `bad`.
///
/// Errors: a file that cannot be read, or whose first row gives no layout.
pub(crate) fn rows(
    sources: &[Source],
    purpose: Purpose,
    rules: &Rules,
    bad: &mut BadRows,
    each: &mut EachRow<'_>,
) -> Result<Vec<Reading>> {
    let mut readings = Vec::new();
    let files = sources.iter().map(|source| source.files.len());
    let firsts = files.scan(0, |next, n| Some(std::mem::replace(next, *next + n)));
    for (source, first) in sources.iter().zip(firsts) {
        let mut left = source.limit.unwrap_or(usize::MAX);
        for (index, path) in source.files.iter().enumerate() {
            if left == 0 {
                break;
            }
            let mut open: Option<OpenFile> = None;
            let result = read::read_rows(path, source.text_unit, &mut |row| {
                if left == 0 {
                    return Err(Error::new(ENOUGH));
                }
                left -= 1;
                let row = match row {
                    Ok(row) => row,
                    Err(e) => return bad.add(e),
                };
                if open.is_none() {
                    open = OpenFile::new(source, &row, purpose, rules)?;
                }
                match &mut open {
                    Some(file) => file.row(row, (first + index) as u32, bad, each),
                    None => Ok(()),
                }
            });
            match result {
                Err(e) if e.what() == ENOUGH => {}
                result => result?,
            }
            readings.extend(open.map(|file| file.reading));
        }
    }
    Ok(readings)
}
