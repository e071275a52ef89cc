//! Statistics of the texts of rows, before they are tokenized: lengths and languages for each role.

use super::parts;
use crate::codec::{ChatRender, TextCodec};
use crate::dataset::DatasetSpec;
use crate::faults::BadRows;
use crate::layout::{ColumnLayout, RenderRules, RowPurpose};
use crate::load::{CHUNK_BYTES, CHUNK_ROWS, text_bytes};
use crate::peek::RowKind;
use crate::read::Row;
use crate::source;
use ft_base::Result;
use ft_base::units::count;
use rayon::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Characters of a text from which its language is determined.
const SAMPLE: usize = 2000;
/// Fewest letters of a text whose language is determined.
const FEWEST: usize = 20;

/// Lengths and languages of the texts of one role, or of all roles.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TextStats {
    /// Characters of each text.
    lengths: Vec<u32>,
    /// Number of texts for each language (ISO 639-3), `""`: not determined.
    languages: BTreeMap<&'static str, usize>,
}

/// Statistics of each role, in order of their first text.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RowStats {
    roles: Vec<(String, TextStats)>,
}

/// Quantiles of a list of numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quantiles {
    /// Number of values.
    pub count: usize,
    /// The percentiles 0, 5, 25, 50, 75, 95, 99 and 100: the smallest value that this share of the values does not
    /// exceed.
    pub values: [u32; 8],
}

/// The shares of `Quantiles::values`.
pub const SHARES: [u32; 8] = [0, 5, 25, 50, 75, 95, 99, 100];

/// Quantiles of these numbers; `None`: there are none.
pub fn quantiles(numbers: &[u32]) -> Option<Quantiles> {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable();
    let rank = |share: u32| (sorted.len() * share as usize).div_ceil(100).max(1) - 1;
    let last = *sorted.last()?;
    Some(Quantiles {
        count: sorted.len(),
        values: SHARES.map(|share| sorted.get(rank(share)).copied().unwrap_or(last)),
    })
}

/// The language of a text, as ISO 639-3; `None`: the text is too short, or the result is not reliable.
pub fn language(text: &str) -> Option<&'static str> {
    let end = text.char_indices().nth(SAMPLE).map_or(text.len(), |(at, _)| at);
    let text = &text[..end];
    if text.chars().filter(|c| c.is_alphabetic()).count() < FEWEST {
        return None;
    }
    let found = whatlang::detect(text).filter(whatlang::Info::is_reliable)?;
    Some(found.lang().code())
}

/// Role, characters and language of a text.
pub(super) type TextMeasure = (String, u32, Option<&'static str>);

pub(super) fn measure(parts: Vec<parts::RowText>) -> Vec<TextMeasure> {
    let one = |part: parts::RowText| {
        let length = u32::try_from(part.text.chars().count()).unwrap_or(u32::MAX);
        (part.role, length, language(&part.text))
    };
    let parts = parts.into_iter().filter(|p| p.role != "label");
    parts.map(one).collect()
}

impl RowStats {
    /// Reads all rows of these files; `kind`: what they are used for; `answer`: the column with the known answer of a
    /// prompt.
    ///
    /// # Errors
    /// A broken row, with its place.
    pub fn read(
        spec: &DatasetSpec,
        kind: RowKind,
        answer: &str,
        codec: &dyn TextCodec,
        template: Option<&dyn ChatRender>,
    ) -> Result<Self> {
        let purpose = match kind {
            RowKind::Text => RowPurpose::Learn,
            RowKind::Pairs | RowKind::Judged => RowPurpose::Prefer,
            RowKind::Prompts => RowPurpose::Ask,
        };
        let (mut out, mut waiting, mut bytes) = (Self::default(), Vec::<(Row, Arc<ColumnLayout>)>::new(), 0);
        let (mut bad, encoder) = (BadRows::new(), spec.encoder(codec, template));
        let rules = match kind {
            RowKind::Prompts => RenderRules {
                answer,
                ..spec.rules(&encoder)
            },
            _ => spec.rules(&encoder),
        };
        source::rows(
            spec.sources,
            purpose,
            &rules,
            spec.screen,
            &mut bad,
            &mut |row, layout, _, bad| {
                bad.good();
                bytes += text_bytes(&row);
                waiting.push((row, layout.clone()));
                if waiting.len() >= CHUNK_ROWS || bytes >= CHUNK_BYTES {
                    bytes = 0;
                    out.flush(&mut waiting);
                }
                Ok(())
            },
        )?;
        out.flush(&mut waiting);
        bad.end()?;
        Ok(out)
    }

    fn flush(&mut self, rows: &mut Vec<(Row, Arc<ColumnLayout>)>) {
        let all: Vec<_> = rows
            .par_iter()
            .map(|(row, layout)| measure(parts::of(row, layout)))
            .collect();
        rows.clear();
        all.into_iter().flatten().for_each(|text| self.add(text));
    }

    pub(super) fn add(&mut self, (role, length, language): TextMeasure) {
        let at = self.roles.iter().position(|(known, _)| *known == role);
        let at = at.unwrap_or_else(|| {
            self.roles.push((role, TextStats::default()));
            self.roles.len() - 1
        });
        let stats = &mut self.roles[at].1;
        stats.lengths.push(length);
        *stats.languages.entry(language.unwrap_or_default()).or_default() += 1;
    }

    /// The statistics of each role.
    pub fn roles(&self) -> impl Iterator<Item = (&str, &TextStats)> {
        self.roles.iter().map(|(role, stats)| (role.as_str(), stats))
    }

    /// A table of lengths, and the languages of each role.
    pub fn lines(&self) -> Vec<String> {
        let mut out = vec![format!(
            "{:<12} {:>9} {:>7} {:>7} {:>7} {:>7} {:>7}  languages",
            "characters", "texts", "5 %", "median", "95 %", "99 %", "most"
        )];
        for (role, stats) in self.roles() {
            let Some(q) = stats.lengths() else { continue };
            let [_, low, _, median, _, high, higher, most] = q.values.map(|n| count(u64::from(n)));
            let texts = count(q.count as u64);
            let mut languages: Vec<String> = Vec::new();
            for (name, n) in stats.languages().into_iter().take(5) {
                let name = if name.is_empty() { "unknown" } else { name };
                languages.push(format!("{name} {:.1} %", 100.0 * n as f64 / q.count as f64));
            }
            out.push(format!(
                "{role:<12} {texts:>9} {low:>7} {median:>7} {high:>7} {higher:>7} {most:>7}  {}",
                languages.join(", ")
            ));
        }
        out
    }

    /// The same as JSON: for each role the quantiles and the number of texts in each language.
    pub fn json(&self) -> Value {
        let role = |(role, stats): (&str, &TextStats)| {
            let quantiles = stats.lengths().map(|q| {
                let named = SHARES.iter().zip(q.values).map(|(s, v)| (s.to_string(), json!(v)));
                Value::Object(named.collect())
            });
            let languages = stats.languages().into_iter();
            let named =
                languages.map(|(name, n)| (if name.is_empty() { "unknown" } else { name }.to_string(), json!(n)));
            let value = json!({
                "texts": stats.lengths.len(), "characters": quantiles, "languages": Value::Object(named.collect()),
            });
            (role.to_string(), value)
        };
        Value::Object(self.roles().map(role).collect())
    }
}

impl TextStats {
    /// Quantiles of the lengths in characters.
    pub fn lengths(&self) -> Option<Quantiles> {
        quantiles(&self.lengths)
    }

    /// Languages with their number of texts, the most frequent first; `""` is not determined.
    pub fn languages(&self) -> Vec<(&'static str, usize)> {
        let mut all: Vec<_> = self.languages.iter().map(|(name, n)| (*name, *n)).collect();
        all.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RowFormat;
    use crate::layout::RowPurpose;
    use crate::testing::{layout, row};

    #[test]
    fn quantiles_are_values_of_the_list() {
        let numbers: Vec<u32> = (1..=100).rev().collect();
        let q = quantiles(&numbers).unwrap();
        assert_eq!((q.count, q.values), (100, [1, 5, 25, 50, 75, 95, 99, 100]));
        assert_eq!(quantiles(&[7]).unwrap().values, [7; 8]);
        assert_eq!(quantiles(&[]), None);
    }

    #[test]
    fn languages_are_found_and_doubtful_ones_are_not() {
        let texts = [
            (
                "The river runs through the old town and under the bridge, where the children play in the summer, and \
                 their parents sit on the grass and talk about everything that happened during the week.",
                Some("eng"),
            ),
            (
                "Der Fluss fließt durch die alte Stadt und unter der Brücke hindurch, wo die Kinder im Sommer spielen, \
                 und ihre Eltern sitzen auf der Wiese und reden über alles, was in der Woche geschehen ist.",
                Some("deu"),
            ),
            (
                "这条河流经古老的城市，在桥下流过，然后流向大海和远方的山谷。",
                Some("cmn"),
            ),
            ("2 + 2 = 4", None),
            ("ok", None),
        ];
        for (text, wanted) in texts {
            assert_eq!(language(text), wanted, "{text}");
        }
    }

    #[test]
    fn rows_are_counted_by_role() {
        let mut stats = RowStats::default();
        for answer in ["Yes, the river runs through the old town.", "No."] {
            let row = row(
                json!({"messages": [{"role": "user", "content": "Is it so?"}, {"role": "assistant", "content": answer}]}),
            );
            let layout = layout(&row, RowFormat::Auto, RowPurpose::Learn).unwrap();
            measure(parts::of(&row, &layout))
                .into_iter()
                .for_each(|text| stats.add(text));
        }
        let json = stats.json();
        assert_eq!(json["assistant"]["characters"]["100"], 41);
        assert_eq!(json["assistant"]["languages"], json!({"eng": 1, "unknown": 1}));
        assert_eq!(json["user"]["texts"], 2);
        let lines = stats.lines();
        assert!(
            lines.len() == 3 && lines[1].starts_with("user") && lines[2].contains("eng 50.0 %"),
            "{lines:?}"
        );
    }
}
