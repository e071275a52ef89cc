//! "Did you mean": the name that was probably meant.

/// Returns the nearest of `names` to `typed`, if the distance is small enough.
pub fn nearest<'a>(typed: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |s: &str| s.to_lowercase().replace(['-', ' '], "_");
    let typed = plain(typed);
    let limit = (typed.chars().count() / 3).max(1);
    names
        .into_iter()
        .map(|name| {
            let plain = plain(name);
            let distance = if plain == typed {
                0
            } else {
                strsim::damerau_levenshtein(&plain, &typed)
            };
            (distance, name)
        })
        .min_by_key(|(distance, _)| *distance)
        .filter(|(distance, _)| *distance <= limit)
        .map(|(_, name)| name)
}
