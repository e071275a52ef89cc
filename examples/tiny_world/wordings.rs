//! The wordings of each task: in plain text (statements, or a question line and an answer line) and in chat.
//!
//! Plain text has many wordings, including those of the chat rows, and its answers are full sentences that start with
//! the subject of the question. Fine-tuning teaches the form: the chat format, the bare answer, the stop token.

use crate::world::{Dice, Item, Task};

/// The layout of a question and its answer in plain text. Their distance varies: a model that learned to look back a
/// fixed number of tokens could not apply its sums in the chat format.
const FRAMES: [&str; 5] = [
    "{question}\n{reply}",
    "Question:\n{question}\nAnswer:\n{reply}",
    "Asked:\n{question}\nThe reply was:\n{reply}",
    "A traveller asks:\n{question}\nAn old friend says:\n{reply}",
    "{question}\nLet me think about it.\n{reply}",
];

/// Templates with `{a}`, `{b}` and `{v}` (the answer).
struct Wording {
    statements: &'static [&'static str],
    /// Used in plain text only.
    questions: &'static [&'static str],
    /// The sentence that follows a question in plain text.
    reply: &'static str,
    /// Used in chat, and in plain text with a full sentence as the answer.
    chat: &'static [&'static str],
}

fn wording(task: Task) -> Wording {
    let (statements, questions, reply, chat): (&[_], &[_], _, &[_]) = match task {
        Task::Home => (
            &["{a} lives in {v}.", "The home of {a} is {v}."],
            &["In which town is the house of {a}?"],
            "{v} is the home of {a}.",
            &["Where does {a} live?", "What is the home town of {a}?"],
        ),
        Task::Craft => (
            &["{a} is a {v} by trade.", "The trade of {a} is {v}."],
            &["How does {a} earn a living?"],
            "{v} is the trade of {a}.",
            &["What is the trade of {a}?", "What work does {a} do?"],
        ),
        Task::Animal => (
            &["{a} keeps a pet {v}.", "The pet of {a} is a {v}."],
            &["Who follows {a} around?"],
            "{v} is the pet of {a}.",
            &["What animal does {a} keep?", "What is the pet of {a}?"],
        ),
        Task::Colour => (
            &["{a} always wears {v} clothes.", "The coat of {a} is {v}."],
            &["How is {a} dressed?"],
            "{v} is the coat of {a}.",
            &["What colour does {a} wear?", "What is the colour of the coat of {a}?"],
        ),
        Task::River => (
            &["{a} lies on the river {v}.", "The river at {a} is the {v}."],
            &["On which water do boats reach {a}?"],
            "{v} is the river at {a}.",
            &["What river runs through {a}?", "What is the river of {a}?"],
        ),
        Task::Ware => (
            &["{a} is known for its {v}.", "The market of {a} sells {v}."],
            &["Why do traders visit {a}?"],
            "{v} is sold at the market of {a}.",
            &["What does {a} sell?", "What is made in {a}?"],
        ),
        Task::Fair => (
            &["{a} holds its fair in {v}.", "The fair of {a} is in {v}."],
            &["At what time do people dance in {a}?"],
            "{v} is the season of the fair of {a}.",
            &["When is the fair in {a}?", "What season has the fair of {a}?"],
        ),
        Task::First => (
            &["{a} begins with {v}."],
            &["With which letter does {a} begin?"],
            "{v} is the first letter of {a}.",
            &["What is the first letter of {a}?", "What letter does {a} start with?"],
        ),
        Task::Last => (
            &["{a} ends with {v}."],
            &["Which letter closes {a}?"],
            "{v} is the last letter of {a}.",
            &["What is the last letter of {a}?", "What letter does {a} end with?"],
        ),
        Task::Length => (
            &["{a} has {v} letters."],
            &["How long is {a}?"],
            "{v} letters make the word {a}.",
            &["How many letters are in {a}?", "Count the letters of {a}."],
        ),
        Task::Spell => (
            &["{a} is written {v}."],
            &["How is {a} written?"],
            "{v} spells {a}.",
            &["Spell {a}.", "What are the letters of {a}?"],
        ),
        Task::Twice => (
            &["{a} two times is {v}."],
            &["How does {a} sound two times?"],
            "{v} is {a} two times.",
            &["Say {a} twice.", "Repeat the word {a}."],
        ),
        Task::Reverse => (
            &["{a} turned around gives {v}."],
            &["How does {a} read from the end?"],
            "{v} is {a} backwards.",
            &["Reverse {a}.", "What is the reverse of {a}?"],
        ),
        Task::Sum => (
            &["{a} + {b} = {v}.", "{a} and {b} make {v}."],
            &["How much do {a} and {b} make?"],
            "{v} is {a} + {b}.",
            &["What is {a} + {b}?", "Add {a} and {b}."],
        ),
        Task::Difference => (
            &["{a} - {b} = {v}.", "{a} less {b} leaves {v}."],
            &["How much does {a} less {b} leave?"],
            "{v} is {a} - {b}.",
            &["What is {a} - {b}?", "Take {b} from {a}."],
        ),
        Task::Larger => (
            &["Of {a} and {b}, {v} is more."],
            &["Is {a} or {b} more?"],
            "{v} is more.",
            &["Which is larger, {a} or {b}?", "Pick the larger of {a} and {b}."],
        ),
    };
    Wording {
        statements,
        questions,
        reply,
        chat,
    }
}

fn fill(template: &str, item: &Item) -> String {
    template
        .replace("{a}", &item.a)
        .replace("{b}", &item.b)
        .replace("{v}", &item.answer)
}

/// Returns one random plain wording of an item: a statement, or a question with its answer on a separate line.
pub fn say(dice: &mut Dice, item: &Item) -> String {
    let w = wording(item.task);
    let choice = dice.below((w.statements.len() + w.questions.len() + w.chat.len()) as u64) as usize;
    if let Some(statement) = w.statements.get(choice) {
        return fill(statement, item);
    }
    let asked: Vec<&str> = w.questions.iter().chain(w.chat).copied().collect();
    let question = fill(asked[choice - w.statements.len()], item);
    dice.pick(&FRAMES)
        .replace("{question}", &question)
        .replace("{reply}", &fill(w.reply, item))
}

/// All chat questions of an item.
pub fn chat(item: &Item) -> Vec<String> {
    wording(item.task).chat.iter().map(|t| fill(t, item)).collect()
}
