//! A set of combinations as few products of values: "these methods with these storages".

use std::collections::{BTreeMap, BTreeSet};

/// One value of each axis.
pub type Combination = Vec<usize>;
/// Some values of each axis: all their combinations.
pub type Product = Vec<BTreeSet<usize>>;

/// Disjoint products whose union is `set`; few, not always the fewest.
pub fn products(set: &BTreeSet<Combination>, axes: usize) -> Vec<Product> {
    let merged = (0..axes).map(|first| {
        let single = |c: &Combination| c.iter().map(|v| BTreeSet::from([*v])).collect();
        let mut all: Vec<Product> = set.iter().map(single).collect();
        // Products that differ in one axis only become one.
        for axis in (0..axes).map(|i| (first + i) % axes) {
            let mut by_rest: BTreeMap<Product, BTreeSet<usize>> = BTreeMap::new();
            for mut product in all {
                let values = std::mem::take(&mut product[axis]);
                by_rest.entry(product).or_default().extend(values);
            }
            let put = |(mut product, values): (Product, _)| {
                product[axis] = values;
                product
            };
            all = by_rest.into_iter().map(put).collect();
        }
        all
    });
    merged.min_by_key(Vec::len).unwrap_or_default()
}
