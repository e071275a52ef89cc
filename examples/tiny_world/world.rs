//! The invented world: homes, crafts and animals of people, rivers of towns, and the items (one task with its answer)
//! from which text and chat rows are made.

use ft::base::rng::{Rng, Stream};

pub const PEOPLE: [&str; 40] = [
    "Abrel", "Adwin", "Arvo", "Belka", "Bramo", "Brisa", "Corly", "Dagny", "Dovic", "Edrun", "Elsin", "Emrik", "Fanto",
    "Galen", "Garda", "Halvi", "Hulda", "Ingram", "Jarek", "Jutta", "Kaspel", "Kelda", "Lantos", "Lisbet", "Madrin",
    "Mirela", "Nadok", "Nerys", "Odrick", "Orsina", "Pavik", "Quillo", "Ragna", "Rosvi", "Selka", "Tamsin", "Torvin",
    "Ulrik", "Vesna", "Yarrow",
];
pub const TOWNS: [&str; 12] = [
    "Brinfell",
    "Carrowick",
    "Dunmere",
    "Estval",
    "Farholt",
    "Glimby",
    "Ilkston",
    "Jorvale",
    "Lunby",
    "Oswick",
    "Tolm",
    "Wexley",
];
const RIVERS: [&str; 6] = ["Ashel", "Brenn", "Corra", "Dwyn", "Fenna", "Mervin"];
const CRAFTS: [&str; 10] = [
    "baker", "weaver", "smith", "potter", "miller", "sailor", "tailor", "mason", "fisher", "scribe",
];
const ANIMALS: [&str; 10] = [
    "fox", "heron", "goat", "otter", "hare", "owl", "cat", "dog", "pony", "raven",
];
const COLOURS: [&str; 8] = ["red", "blue", "green", "yellow", "white", "black", "purple", "orange"];
const WARES: [&str; 8] = ["salt", "honey", "wool", "glass", "paper", "cheese", "rope", "tea"];
const SEASONS: [&str; 4] = ["spring", "summer", "autumn", "winter"];

/// The largest operand of sums and differences.
const LARGEST: u64 = 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Task {
    Home,
    Craft,
    Animal,
    Colour,
    River,
    Ware,
    Fair,
    First,
    Last,
    Length,
    Spell,
    Twice,
    Reverse,
    Sum,
    Difference,
    Larger,
}

/// One task with its answer; `a` and `b` are its subjects (`b` is empty if one is enough).
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Item {
    pub task: Task,
    pub a: String,
    pub b: String,
    pub answer: String,
}

/// A sequence of random choices: a counter over one stream.
pub struct Dice {
    rng: Rng,
    next: u64,
}

impl Dice {
    /// `path` separates the streams for different purposes (row kind, row number).
    pub fn new(seed: u64, path: &[u64]) -> Self {
        Self {
            rng: Rng::new(seed, Stream::Sampling, path),
            next: 0,
        }
    }

    /// Uniform in 0..n; `n` > 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next += 1;
        self.rng.below(self.next, n)
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

/// All content that depends only on the seed.
pub struct World {
    /// Facts, grouped by person or town.
    pub facts: Vec<Vec<Item>>,
    /// Tasks about the words of this world: letters, length, spelling.
    pub words: Vec<Item>,
}

fn item(task: Task, a: impl Into<String>, b: impl Into<String>, answer: impl Into<String>) -> Item {
    Item {
        task,
        a: a.into(),
        b: b.into(),
        answer: answer.into(),
    }
}

/// Separates letters by spaces: `fox` becomes `f o x`.
fn spaced(letters: impl Iterator<Item = char>) -> String {
    letters.map(String::from).collect::<Vec<_>>().join(" ")
}

impl World {
    pub fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed, &[0]);
        let mut facts = Vec::new();
        for p in PEOPLE {
            facts.push(vec![
                item(Task::Home, p, "", *dice.pick(&TOWNS)),
                item(Task::Craft, p, "", *dice.pick(&CRAFTS)),
                item(Task::Animal, p, "", *dice.pick(&ANIMALS)),
                item(Task::Colour, p, "", *dice.pick(&COLOURS)),
            ]);
        }
        for t in TOWNS {
            facts.push(vec![
                item(Task::River, t, "", *dice.pick(&RIVERS)),
                item(Task::Ware, t, "", *dice.pick(&WARES)),
                item(Task::Fair, t, "", *dice.pick(&SEASONS)),
            ]);
        }
        let lists: [&[&str]; 5] = [&CRAFTS, &ANIMALS, &COLOURS, &WARES, &SEASONS];
        let mut words = Vec::new();
        for w in lists.into_iter().flatten().copied() {
            let letters: Vec<char> = w.chars().collect();
            words.push(item(Task::First, w, "", letters[0]));
            words.push(item(Task::Last, w, "", letters[letters.len() - 1]));
            words.push(item(Task::Length, w, "", letters.len().to_string()));
            words.push(item(Task::Spell, w, "", spaced(letters.into_iter())));
            words.push(item(Task::Twice, w, "", format!("{w} {w}")));
        }
        Self { facts, words }
    }
}

/// Three letters, to be reversed.
pub fn reverse(dice: &mut Dice) -> Item {
    let letters: Vec<char> = (0..3).map(|_| (b'a' + dice.below(26) as u8) as char).collect();
    item(
        Task::Reverse,
        spaced(letters.iter().copied()),
        "",
        spaced(letters.iter().rev().copied()),
    )
}

/// A sum, a difference that is not negative, or the larger of two numbers.
pub fn arithmetic(dice: &mut Dice) -> Item {
    let (x, y) = (dice.below(LARGEST + 1), dice.below(LARGEST + 1));
    let (low, high) = (x.min(y), x.max(y));
    match dice.below(16) {
        0..=6 => item(Task::Sum, x.to_string(), y.to_string(), (x + y).to_string()),
        7..=13 => item(
            Task::Difference,
            high.to_string(),
            low.to_string(),
            (high - low).to_string(),
        ),
        _ if x == y => arithmetic(dice),
        _ => item(Task::Larger, x.to_string(), y.to_string(), high.to_string()),
    }
}
