//! Pages of pyarrow, and pages made by hand that ask for too much.

use super::*;
use crate::testing::goldens;
use parquet::schema::parser::parse_message_type;
use parquet::schema::types::SchemaDescriptor;

fn golden(name: &str) -> Vec<u8> {
    std::fs::read(goldens().join("parquet").join(name)).unwrap()
}

fn file(bytes: &[u8]) -> File {
    use std::io::Write;
    let mut out = tempfile::tempfile().unwrap();
    out.write_all(bytes).unwrap();
    out
}

#[test]
fn every_page_of_pyarrow_is_found_and_fits() {
    for name in ["plain.parquet", "snappy.parquet", "zstd.parquet"] {
        let limited = CheckedFile::open(file(&golden(name))).unwrap();
        let mut pages = 0;
        for n in 0..limited.num_row_groups() {
            let group = limited.get_row_group(n).unwrap();
            for column in 0..group.num_columns() {
                pages += group
                    .get_column_page_reader(column)
                    .unwrap()
                    .map(Result::unwrap)
                    .count();
            }
        }
        assert!(pages >= 11, "{name}: {pages}");
    }
}

/// Row F11.
#[test]
fn a_page_that_would_take_much_memory_is_refused() {
    // Type, size, size in the file, end of the header; 3 bytes.
    let page = |plain: [u8; 5]| [&[0x15, 0, 0x15][..], &plain, &[0x15, 6, 0], b"abc"].concat();
    let check = |bytes: &[u8]| headers(&file(bytes), 0, bytes.len() as u64);
    let e = check(&page([0xfe, 0xff, 0xff, 0xff, 0x0f])).unwrap_err().to_string();
    assert!(e.contains("a page of 3 bytes asks for 2147483647 bytes"), "{e}");
    assert!(check(&page([0x86, 0x80, 0x80, 0x80, 0x00])).is_ok());
    let e = headers(&file(b"abc"), 1, 3).unwrap_err().to_string();
    assert!(e.contains("outside of the file"), "{e}");
}

/// Row F11. Found by fuzzing: the decoder reads field 8 as a struct, though the file says that it is an integer, and so
/// finds a list of 2^31 values in bytes that hold none.
#[test]
fn a_page_header_that_can_be_read_in_two_ways_is_refused() {
    let whole = [0x15, 6, 0x15, 6, 0x15, 6];
    let check = |rest: &[u8]| {
        let bytes = [&whole[..], rest, b"abc"].concat();
        headers(&file(&bytes), 0, bytes.len() as u64)
    };
    // Field 8: a struct of one integer, then an integer.
    assert!(check(&[0x5c, 0x15, 2, 0, 0]).is_ok());
    let e = check(&[0x55, 2, 0]).unwrap_err().to_string();
    assert!(e.contains("header of a page is damaged"), "{e}");
    // An unknown field: a list of an integer, then one of a boolean, whose values take no bytes for the decoder.
    assert!(check(&[0xc9, 0x15, 2, 0]).is_ok());
    assert!(check(&[0xc9, 0x11, 1, 0]).is_err());
    assert!(check(&[0xc9, 0x19, 0xf1, 0xff, 0xff, 0xff, 0xff, 7, 0]).is_err());
}

/// Row F11. The footer has an unknown field: 100 lists of 2^31 - 1 booleans, which the decoder would count for hours.
#[test]
fn a_footer_with_lists_of_nothing_is_refused() {
    let good = golden("plain.parquet");
    let with = |extra: &[u8]| {
        let (rest, tail) = good.split_at(good.len() - 8);
        let length = u32::from_le_bytes(tail[..4].try_into().unwrap()) as usize;
        let (pages, footer) = rest.split_at(rest.len() - length);
        let footer = [&footer[..length - 1], extra, &[0]].concat();
        [pages, &footer, &(footer.len() as u32).to_le_bytes(), b"PAR1"].concat()
    };
    let rows = |bytes: &[u8]| CheckedFile::open(file(bytes)).map(|file| file.metadata().file_metadata().num_rows());
    // Field 100.
    let list = |elements: &[u8]| [&[9, 0xc8, 1][..], elements].concat();
    assert_eq!(rows(&with(&list(&[0x25, 2, 4]))).unwrap(), rows(&good).unwrap());
    let many = [&[0xf9, 100][..], &[0xf1, 0xff, 0xff, 0xff, 0xff, 7].repeat(100)].concat();
    let e = rows(&with(&list(&many))).unwrap_err().to_string();
    assert!(e.contains("footer of the file is damaged"), "{e}");
}

/// One byte of a dictionary page of pyarrow is changed: its number of values.
#[test]
fn a_dictionary_with_more_values_than_bytes_is_refused() {
    let mut bytes = golden("zstd.parquet");
    let start =
        |at: &usize| bytes[*at..].starts_with(&[0x15, 4, 0x15]) && bytes[at + 6..].starts_with(&[0x4c, 0x15, 4]);
    let at = (0..bytes.len() - 9).find(start).unwrap();
    bytes[at + 8] = 0x7e;
    let limited = CheckedFile::open(file(&bytes)).unwrap();
    let mut rows = limited.get_row_iter(None).unwrap();
    let e = rows.find_map(|row| row.err()).unwrap().to_string();
    assert!(e.contains("asks for 63 values"), "{e}");
}

struct One(Option<Page>);

impl Iterator for One {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.take().map(Ok)
    }
}

impl PageReader for One {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        Ok(self.0.take())
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        Ok(None)
    }

    fn skip_next_page(&mut self) -> Result<()> {
        Ok(())
    }
}

/// The pages of the first column of a schema: this one.
fn pages(schema: &str, page: Page, file_bytes: u64) -> Pages {
    let schema = SchemaDescriptor::new(Arc::new(parse_message_type(schema).unwrap()));
    let column = schema.column(0);
    Pages {
        inner: Box::new(One(Some(page))),
        demand: Demand::new(Budget::new(file_bytes), schema.get_column_root(0), &column),
        column,
        in_row: 0,
    }
}

fn data_page(bytes: &[u8], num_values: u32, encoding: Encoding) -> Page {
    Page::DataPage {
        buf: bytes.to_vec().into(),
        num_values,
        encoding,
        def_level_encoding: Encoding::RLE,
        rep_level_encoding: Encoding::RLE,
        statistics: None,
    }
}

fn of_page(schema: &str, bytes: &[u8], num_values: u32, encoding: Encoding) -> Result<Option<Page>> {
    let page = data_page(bytes, num_values, encoding);
    pages(schema, page, bytes.len() as u64).get_next_page()
}

#[test]
fn counts_inside_a_page_are_compared_with_its_bytes() {
    let flat = "message m { required binary text; }";
    // 128 values in a block of 4 parts; 2^31 of them; the first one 0.
    let many = [0x80, 1, 4, 0x80, 0x80, 0x80, 0x80, 0x08, 0];
    let none = [0x80, 1, 4, 2, 0, 0, 0, 0, 0, 0];
    for (bytes, encoding) in [
        (many.to_vec(), Encoding::DELTA_LENGTH_BYTE_ARRAY),
        (many.to_vec(), Encoding::DELTA_BYTE_ARRAY),
        ([&none[..], &many[..]].concat(), Encoding::DELTA_BYTE_ARRAY),
    ] {
        let e = of_page(flat, &bytes, 2, encoding).unwrap_err().to_string();
        assert!(e.contains("asks for 2147483648 values"), "{e}");
    }
    assert!(of_page(flat, &many, 2, Encoding::PLAIN).is_ok());
}

/// Levels of a page of the first version: their length, then runs.
#[test]
fn a_row_is_as_long_as_its_levels_say() {
    let list = "message m { repeated int32 n; }";
    let page = |levels: &[u8], values: u32| {
        let bytes = [&(levels.len() as u32).to_le_bytes()[..], levels, &[9; 9]].concat();
        of_page(list, &bytes, values, Encoding::PLAIN)
    };
    // A group of 8 bits (a row of 3 values, then one of 5), and a run: 2^30 values of the last row, or 2^30 rows.
    let levels = |level: u8| [3, 0b1111_0110, 0x80, 0x80, 0x80, 0x80, 0x08, level];
    assert!(page(&levels(0), 1 << 30).is_ok());
    assert!(page(&levels(1), 1 << 17).is_ok());
    let e = page(&levels(1), 1 << 20).unwrap_err().to_string();
    // 2^20 - 3 values of 192 bytes each.
    assert!(
        e.contains("a row of this file would take 191 MiB of memory; 48 MiB are the most for a file of 21 bytes"),
        "{e}"
    );
}

#[allow(deprecated)]
const OLD_LEVELS: Encoding = Encoding::BIT_PACKED;

#[test]
fn levels_that_are_not_read_count_as_one_row() {
    let page = |values| {
        let page = Page::DataPage {
            buf: vec![255; 9].into(),
            num_values: values,
            encoding: Encoding::PLAIN,
            def_level_encoding: Encoding::RLE,
            rep_level_encoding: OLD_LEVELS,
            statistics: None,
        };
        pages("message m { repeated int32 n; }", page, 9).get_next_page()
    };
    assert!(page(1 << 17).is_ok());
    assert!(page(1 << 30).is_err());
}

/// A row of many times the same text of a dictionary.
#[test]
fn a_text_counts_as_often_as_a_row_has_it() {
    let list = "message m { repeated binary text (UTF8); }";
    let text = vec![b'a'; 500_000];
    let dictionary = Page::DictionaryPage {
        buf: [&(text.len() as u32).to_le_bytes()[..], &text].concat().into(),
        num_values: 1,
        encoding: Encoding::PLAIN,
        is_sorted: false,
    };
    let levels = |values: u8| [&[4, 0, 0, 0, 2, 0, values << 1, 1][..], &[9; 9]].concat();
    let check = |file_bytes, values: u8| {
        let mut pages = pages(list, dictionary.clone(), file_bytes);
        pages.get_next_page().unwrap();
        let bytes = levels(values);
        pages.inner = Box::new(One(Some(data_page(
            &bytes,
            u32::from(values) + 1,
            Encoding::RLE_DICTIONARY,
        ))));
        pages.get_next_page().map(|_| ())
    };
    assert!(check(200, 40).is_ok());
    let e = check(200, 63).unwrap_err().to_string();
    assert!(e.contains("a row of this file would take"), "{e}");
    assert!(check(100_000, 63).is_ok());
}
