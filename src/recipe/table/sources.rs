//! A source of training rows: one table of `[[data.sources]]`.

use super::*;
use crate::recipe::check::{KeyValues, ValueOrigin};
use crate::recipe::value::{ByKind, KeyValue};
use ft_data::Mapping;

section! {
    /// Rows from one place, with their own settings.
    pub struct SourceKeys in "data.sources" {
        /// As `data.train`: a file, a folder, a pattern or a hub dataset, or a list of them.
        path: Vec<String>;
        /// Share of the rows of an epoch, in relation to the weights of the other sources. An epoch has as many rows as
        /// all sources together. A source with more rows than its share gives other ones in the next epoch; a source
        /// with fewer gives some again.
        weight: Option<f64> = "auto", "each row once in an epoch; give a weight to every source, or to none", in POSITIVE;
        /// As `data.format`.
        format: RowFormat = "auto", "as `data.format`";
        /// As `data.columns`.
        columns: Vec<(ColumnRole, String)> = {}, "as `data.columns`";
        /// As `data.roles`.
        roles: Vec<(String, ChatRole)> = {}, "as `data.roles`";
        /// As `data.prompt_template`.
        prompt_template: Option<String> = "", "as `data.prompt_template`";
        /// As `data.system_prompt`.
        system_prompt: Option<String> = "", "as `data.system_prompt`";
        /// As `data.text_unit`.
        text_unit: TextUnit = "auto", "as `data.text_unit`";
        /// Number of rows to read, from the first one; `0`: all.
        limit: Option<usize> = "auto", "as `data.limit`", in from(0);
        /// As `data.config`.
        config: Option<String> = "", "as `data.config`";
        /// As `data.split`.
        split: Option<String> = "", "as `data.split`";
        /// As `data.revision`.
        revision: Option<String> = "", "as `data.revision`";
    }
}

impl KeyType<ByKind> for Vec<SourceKeys> {
    const KIND: ValueKind = ValueKind::Tables(SourceKeys::KEYS);

    fn read(value: &KeyValue) -> Self {
        let KeyValue::Tables(tables) = value else {
            return Vec::new();
        };
        let one = |written: &Vec<(&'static str, KeyValue)>| {
            let mut values = KeyValues::defaults(SourceKeys::KEYS.iter());
            for (name, value) in written {
                if let Some(entry) = values.0.iter_mut().find(|e| e.key.name == *name) {
                    (entry.value, entry.origin) = (value.clone(), ValueOrigin::Recipe);
                }
            }
            <SourceKeys as Section>::read(&values)
        };
        tables.iter().map(one).collect()
    }
}

impl Data {
    /// The columns of all rows, without those of single sources.
    pub fn mapping(&self) -> Mapping {
        Mapping {
            columns: self.columns.clone(),
            roles: self.roles.clone(),
            prompt_template: self.prompt_template.clone(),
            system_prompt: self.system_prompt.clone(),
        }
    }
}

impl SourceKeys {
    /// The columns of this source.
    pub fn mapping(&self, data: &Data) -> Mapping {
        let given = data.mapping();
        let own_prompt = self.prompt_template.is_some() || !self.columns.is_empty();
        Mapping {
            columns: if self.columns.is_empty() {
                given.columns
            } else {
                self.columns.clone()
            },
            roles: if self.roles.is_empty() {
                given.roles
            } else {
                self.roles.clone()
            },
            // A template of `[data]` is not for the columns of this source.
            prompt_template: if own_prompt {
                self.prompt_template.clone()
            } else {
                given.prompt_template
            },
            system_prompt: self.system_prompt.clone().or(given.system_prompt),
        }
    }
}

/// Contradictions.
pub(super) fn check(s: &RecipeSections, faults: &mut KeyFaults) {
    let data = &s.data;
    if let Err(error) = data.mapping().check() {
        faults.add(&[Data::prompt_template, Data::columns], error);
    }
    for source in &data.sources {
        if let Err(error) = source.mapping(data).check() {
            faults.add(&[Data::sources], error);
        }
    }
    let weighted = data.sources.iter().filter(|source| source.weight.is_some()).count();
    if weighted > 0 && weighted < data.sources.len() {
        faults.add(
            &[Data::sources],
            Error::usage("some of `data.sources` have a `weight` and others have none")
                .found(format!("{weighted} of {} with a weight", data.sources.len()))
                .hint("give each source a weight, or none: then an epoch has each row once"),
        );
    }
    if let Some(source) = data.sources.iter().find(|source| source.path.is_empty()) {
        faults.add(
            &[Data::sources],
            Error::usage("a source of `data.sources` has an empty `path`").found(format!("{:?}", source.path)),
        );
    }
}
