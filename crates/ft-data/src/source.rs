//! A source: files, how their rows are read, and their weight in a mixture. All rows of a run pass through `rows`.

use super::dataset::{EachRow, RowOrigin};
use super::faults::BadRows;
use super::layout::{ColumnLayout, RenderRules, RowPurpose};
use super::load::{CHUNK_BYTES, CHUNK_ROWS, text_bytes};
use super::mapping::{MappedRow, Mapper, Mapping};
use super::mixture::SourceShare;
pub use super::read::is_data_file;
use super::read::{self, Row, RowPosition, TextUnit};
use super::reading::ReadingReport;
use super::screen::Screen;
use super::screen::waiting::{WaitingRow, screened};
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

/// The place of a row of these sources.
pub fn position(sources: &[Source], origin: RowOrigin) -> RowPosition {
    RowPosition {
        file: file(sources, origin.file).into(),
        number: origin.number,
        is_line: origin.is_line,
    }
}

/// The sources with the shares of their rows.
pub fn shares(sources: &[Source]) -> Vec<SourceShare> {
    let share = |source: &Source| SourceShare {
        name: source.name.clone(),
        files: source.files.len(),
        weight: source.weight,
        ..SourceShare::default()
    };
    sources.iter().map(share).collect()
}

/// A file after one of its rows.
enum FirstRow {
    Used(Box<OpenFile>),
    /// The row is skipped, with the reason: a later one decides.
    Skipped(&'static str),
}

/// The rows that are skipped before the first one that is used: reasons and numbers.
#[derive(Debug, Clone, Default)]
struct SkippedFirst(Vec<(&'static str, usize)>);

impl SkippedFirst {
    fn add(&mut self, why: &'static str) {
        match self.0.iter_mut().find(|(known, _)| *known == why) {
            Some((_, rows)) => *rows += 1,
            None => self.0.push((why, 1)),
        }
    }
}

/// One file that is being read.
struct OpenFile {
    mapper: Mapper,
    layout: Arc<ColumnLayout>,
    reading: ReadingReport,
}

impl OpenFile {
    /// Decides from the first row that is used.
    fn at(source: &Source, row: &Row, purpose: RowPurpose, rules: &RenderRules) -> Result<FirstRow> {
        let mapper = Mapper::new(&source.mapping, row, source.format, purpose, rules);
        let mapper = mapper.map_err(|e| e.or_at(&row.place))?;
        let row = match mapper.apply(row.clone())? {
            MappedRow::Row(row) => row,
            MappedRow::Skipped(why) => return Ok(FirstRow::Skipped(why)),
        };
        let mut layout = ColumnLayout::find(&row, source.format, purpose, rules)?;
        mapper.complete(&mut layout).map_err(|e| e.or_at(&row.place))?;
        Ok(FirstRow::Used(Box::new(Self {
            mapper,
            reading: ReadingReport::new(&row.place.file, layout.clone(), &row),
            layout: Arc::new(layout),
        })))
    }

    /// Counts rows that were skipped before the first one that is used.
    fn after(mut self, skipped: &mut SkippedFirst) -> Self {
        skipped.0.drain(..).for_each(|(why, rows)| self.reading.skip(why, rows));
        self
    }

    /// As `at`, with the rows of the file from its beginning. `None`: no row is used.
    fn from_beginning(source: &Source, path: &str, purpose: RowPurpose, rules: &RenderRules) -> Result<Option<Self>> {
        let mut found = None;
        let result = read::read_rows(path, source.text_unit, &mut |row| {
            let row = row?;
            found = match Self::at(source, &row, purpose, rules)? {
                FirstRow::Used(file) => Some(*file),
                FirstRow::Skipped(_) => None,
            };
            let Some(file) = &mut found else { return Ok(()) };
            if let MappedRow::Row(row) = file.mapper.apply(row)? {
                file.reading.see(&row);
            }
            Err(Error::new(ENOUGH))
        });
        match result {
            Err(e) if e.what() != ENOUGH => Err(e),
            _ => Ok(found),
        }
    }

    fn row(&mut self, row: Row, file: u32, bad: &mut BadRows, each: &mut EachRow<'_>) -> Result<()> {
        let origin = RowOrigin {
            file,
            number: row.place.number,
            is_line: row.place.is_line,
        };
        match self.mapper.apply(row) {
            Ok(MappedRow::Row(row)) => {
                self.reading.see(&row);
                each(row, &self.layout, origin, bad)
            }
            Ok(MappedRow::Skipped(why)) => {
                self.reading.skip(why, 1);
                Ok(())
            }
            Err(e) => bad.add(e),
        }
    }
}

/// The readings of files, without the indices of the files.
pub(crate) fn readings(of_files: Vec<(usize, ReadingReport)>) -> Vec<ReadingReport> {
    of_files.into_iter().map(|(_, reading)| reading).collect()
}

/// Reads the rows of some files in any order of the files: each file's layout follows from its first row.
pub(crate) struct RowFiles {
    sources: Vec<Source>,
    open: Vec<Option<OpenFile>>,
    /// True from the first row of a file on that was requested.
    seen: Vec<bool>,
    skipped: Vec<SkippedFirst>,
}

impl RowFiles {
    pub(crate) fn new(sources: &[Source]) -> Self {
        let files = sources.iter().map(|source| source.files.len()).sum();
        Self {
            sources: sources.to_vec(),
            open: std::iter::repeat_with(|| None).take(files).collect(),
            seen: vec![false; files],
            skipped: vec![SkippedFirst::default(); files],
        }
    }

    /// How the files are read: from the rows so far, or from its first row where none was used. Files of a source with a
    /// limit may lie behind it, and are not opened for this.
    ///
    /// Errors: as `rows`.
    pub(crate) fn readings(&self, rules: &RenderRules) -> Result<Vec<ReadingReport>> {
        let limited = self
            .sources
            .iter()
            .flat_map(|s| s.files.iter().map(|_| s.limit.is_some()));
        let mut out = Vec::new();
        for (index, (file, is_limited)) in self.open.iter().zip(limited).enumerate() {
            match file {
                Some(file) => out.push(file.reading.clone()),
                None if is_limited => {}
                None => out.extend(first_reading(&self.sources, index, RowPurpose::Learn, rules)?),
            }
        }
        Ok(out)
    }

    /// A row of file `index` (over all sources) with its usual columns. `None`: the row is not used.
    ///
    /// Errors: the first row of a file gives no layout; the row is broken.
    pub(crate) fn row(
        &mut self,
        index: usize,
        row: Row,
        rules: &RenderRules,
    ) -> Result<Option<(Row, Arc<ColumnLayout>)>> {
        let open = match &mut self.open[index] {
            Some(open) => open,
            none => {
                let (source, path) = of_file(&self.sources, index)?;
                // A run that is resumed may begin in the middle of a file, whose layout is that of its first row.
                let may_begin_late = !self.seen[index] && row.place.number != FIRST_NUMBER;
                self.seen[index] = true;
                let opened = if may_begin_late {
                    OpenFile::from_beginning(source, path, RowPurpose::Learn, rules)?
                } else {
                    match OpenFile::at(source, &row, RowPurpose::Learn, rules)? {
                        FirstRow::Used(file) => Some(file.after(&mut self.skipped[index])),
                        FirstRow::Skipped(why) => {
                            self.skipped[index].add(why);
                            None
                        }
                    }
                };
                let Some(open) = opened else { return Ok(None) };
                none.insert(open)
            }
        };
        match open.mapper.apply(row)? {
            MappedRow::Row(row) => {
                open.reading.see(&row);
                Ok(Some((row, open.layout.clone())))
            }
            MappedRow::Skipped(why) => {
                open.reading.skip(why, 1);
                Ok(None)
            }
        }
    }
}

/// The source of a file, and the path of the file, by its index over all sources.
fn of_file(sources: &[Source], index: usize) -> Result<(&Source, &str)> {
    let mut files = sources
        .iter()
        .flat_map(|source| source.files.iter().map(move |file| (source, file.as_str())));
    let missing = || Error::internal("a file is not in the list of files").found(index);
    files.nth(index).ok_or_else(missing)
}

/// How the rows of file `index` (over all sources) are read, with the columns of its first row. `None`: no row is used.
///
/// Errors: as `rows`.
pub(crate) fn first_reading(
    sources: &[Source],
    index: usize,
    purpose: RowPurpose,
    rules: &RenderRules,
) -> Result<Option<ReadingReport>> {
    let (source, path) = of_file(sources, index)?;
    let found = OpenFile::from_beginning(source, path, purpose, rules)?;
    Ok(found.map(|file| file.reading))
}

/// The smallest number of a row or a line.
const FIRST_NUMBER: u64 = 1;

/// Ends the reading of a file; never shown.
const ENOUGH: &str = "enough rows of this source";

/// Passes the rows of these files of a source to `each`, with the index of their file, up to the limit of the source.
///
/// Errors: a file that cannot be read; or `each` stops the reading.
pub(crate) fn limited(
    source: &Source,
    files: &[String],
    each: &mut dyn FnMut(usize, Result<Row>) -> Result<()>,
) -> Result<()> {
    let mut left = source.limit.unwrap_or(usize::MAX);
    for (index, path) in files.iter().enumerate().take_while(|_| source.limit != Some(0)) {
        let read = read::read_rows(path, source.text_unit, &mut |row| {
            each(index, row)?;
            left -= 1;
            // Neither the next row nor the next file is read.
            if left > 0 { Ok(()) } else { Err(Error::new(ENOUGH)) }
        });
        match read {
            Err(e) if e.what() == ENOUGH => return Ok(()),
            read => read?,
        }
    }
    Ok(())
}

/// Passes each row of the sources to `each` with its file's layout and its origin; broken rows go to `bad`.
///
/// Errors: a file that cannot be read, or whose first row gives no layout.
pub(crate) fn rows(
    sources: &[Source],
    purpose: RowPurpose,
    rules: &RenderRules,
    screen: Option<&Screen>,
    bad: &mut BadRows,
    each: &mut EachRow<'_>,
) -> Result<Vec<(usize, ReadingReport)>> {
    let mut readings = Vec::new();
    // Rows that wait for the screen, which handles many at a time.
    let (mut waiting, mut bytes): (Vec<(Row, WaitingRow)>, usize) = (Vec::new(), 0);
    let mut next = |row: Row, layout: &Arc<ColumnLayout>, origin: RowOrigin, bad: &mut BadRows| -> Result<()> {
        let Some(screen) = screen else {
            return each(row, layout, origin, bad);
        };
        bytes += text_bytes(&row);
        waiting.push((row, WaitingRow(layout.clone(), origin)));
        if waiting.len() >= CHUNK_ROWS || bytes >= CHUNK_BYTES {
            bytes = 0;
            screened(screen, &mut waiting, bad, each)?;
        }
        Ok(())
    };
    let files = sources.iter().map(|source| source.files.len());
    let firsts = files.scan(0, |next, n| Some(std::mem::replace(next, *next + n)));
    for (source, first) in sources.iter().zip(firsts) {
        let mut open: Vec<Option<OpenFile>> = source.files.iter().map(|_| None).collect();
        let mut skipped: Vec<SkippedFirst> = vec![SkippedFirst::default(); open.len()];
        limited(source, &source.files, &mut |index, row| {
            let row = match row {
                Ok(row) => row,
                Err(e) => return bad.add(e),
            };
            let open = &mut open[index];
            let file = match open {
                Some(file) => file,
                none => match OpenFile::at(source, &row, purpose, rules)? {
                    FirstRow::Skipped(why) => {
                        skipped[index].add(why);
                        return Ok(());
                    }
                    FirstRow::Used(file) => {
                        let file = none.insert(file.after(&mut skipped[index]));
                        screen
                            .iter()
                            .for_each(|screen| file.reading.set_judges(screen.columns()));
                        file
                    }
                },
            };
            file.row(row, (first + index) as u32, bad, &mut next)
        })?;
        let read = open.into_iter().enumerate();
        readings.extend(read.filter_map(|(index, file)| Some((first + index, file?.reading))));
    }
    if let Some(screen) = screen {
        screened(screen, &mut waiting, bad, each)?;
    }
    Ok(readings)
}
