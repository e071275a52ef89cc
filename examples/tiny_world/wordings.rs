//! How each task is said: in plain text (statements, a question line with an answer line) and in chat.
//!
//! The chat questions appear nowhere in the plain text, and the plain answers are whole sentences:
//! what fine-tuning teaches is to answer a question in the chat format with the bare answer and stop.

use crate::world::{Item, Task};

/// Templates with `{a}`, `{b}` and `{v}` (the answer).
struct Wording {
    statements: &'static [&'static str],
    questions: &'static [&'static str],
    chat: &'static [&'static str],
}

fn wording(task: Task) -> Wording {
    let (statements, questions, chat): (&[_], &[_], &[_]) = match task {
        Task::Home => (
            &[
                "{a} lives in {v}.",
                "The home of {a} is {v}.",
                "{v} is the home of {a}.",
            ],
            &[
                "In which town is the house of {a}?\n{v} is the home of {a}.",
                "Which town is home to {a}?\n{a} lives in {v}.",
            ],
            &["Where does {a} live?", "What is the home town of {a}?"],
        ),
        Task::Craft => (
            &[
                "{a} is a {v} by trade.",
                "The trade of {a} is {v}.",
                "{v} is the trade of {a}.",
            ],
            &[
                "Which trade has {a} learned?\n{v} is the trade of {a}.",
                "How does {a} earn a living?\n{a} is a {v} by trade.",
            ],
            &["What is the craft of {a}?", "What work does {a} do?"],
        ),
        Task::Animal => (
            &[
                "{a} keeps a pet {v}.",
                "The pet of {a} is a {v}.",
                "{v} is the pet of {a}.",
            ],
            &[
                "Which pet is with {a}?\n{v} is the pet of {a}.",
                "Who follows {a} around?\n{a} keeps a pet {v}.",
            ],
            &["What animal does {a} keep?", "What is the animal of {a}?"],
        ),
        Task::Colour => (
            &[
                "{a} always wears {v} clothes.",
                "The coat of {a} is {v}.",
                "{v} is the coat of {a}.",
            ],
            &[
                "Which coat belongs to {a}?\n{v} is the coat of {a}.",
                "How is {a} dressed?\n{a} always wears {v} clothes.",
            ],
            &["What colour does {a} wear?", "What is the colour of {a}?"],
        ),
        Task::River => (
            &[
                "{a} lies on the river {v}.",
                "The river at {a} is the {v}.",
                "{v} is the river at {a}.",
            ],
            &[
                "Which water passes {a}?\n{v} is the river at {a}.",
                "On which water do boats reach {a}?\n{a} lies on the river {v}.",
            ],
            &["What river runs through {a}?", "What is the river of {a}?"],
        ),
        Task::Ware => (
            &[
                "{a} is known for its {v}.",
                "The market of {a} sells {v}.",
                "{v} come from the market of {a}.",
            ],
            &[
                "Which goods come from {a}?\n{v} come from the market of {a}.",
                "Why do traders visit {a}?\n{a} is known for its {v}.",
            ],
            &["What does {a} sell?", "What is made in {a}?"],
        ),
        Task::Fair => (
            &[
                "{a} holds its fair in {v}.",
                "The fair of {a} is in {v}.",
                "{v} is the time of the fair of {a}.",
            ],
            &[
                "Which season brings the fair of {a}?\n{v} is the time of the fair of {a}.",
                "At what time do people dance in {a}?\n{a} holds its fair in {v}.",
            ],
            &["When is the fair in {a}?", "What season has the fair of {a}?"],
        ),
        Task::First => (
            &["{a} begins with {v}.", "{v} is the first letter of {a}."],
            &["With which letter does {a} begin?\n{v} is the first letter of {a}."],
            &["What is the first letter of {a}?", "What letter does {a} start with?"],
        ),
        Task::Last => (
            &["{a} ends with {v}.", "{v} is the last letter of {a}."],
            &["With which letter does {a} end?\n{v} is the last letter of {a}."],
            &["What is the last letter of {a}?", "What letter does {a} stop with?"],
        ),
        Task::Length => (
            &["{a} has {v} letters.", "{v} letters make the word {a}."],
            &["How long is {a}?\n{v} letters make the word {a}."],
            &["How many letters are in {a}?", "Count the letters of {a}."],
        ),
        Task::Spell => (
            &["{a} is written {v}.", "{v} spells {a}."],
            &["Which letters spell {a}?\n{v} spells {a}."],
            &["Spell {a}.", "What are the letters of {a}?"],
        ),
        Task::Twice => (
            &["{a} two times is {v}.", "{v} is {a} two times."],
            &["How does {a} sound two times?\n{v} is {a} two times."],
            &["Say {a} twice.", "Repeat the word {a}."],
        ),
        Task::Reverse => (
            &["{a} backwards is {v}.", "{a} turned around gives {v}."],
            &["How does {a} read from the end?\n{v} is {a} backwards."],
            &["Reverse {a}.", "What is the reverse of {a}?"],
        ),
        Task::Sum => (
            &["{a} + {b} = {v}.", "{a} and {b} make {v}."],
            &[
                "How much do {a} and {b} make?\n{v} is {a} + {b}.",
                "{a} + {b}?\n{v} is {a} + {b}.",
            ],
            &["What is {a} + {b}?", "Add {a} and {b}."],
        ),
        Task::Difference => (
            &["{a} - {b} = {v}.", "{a} less {b} leaves {v}."],
            &[
                "How much does {a} less {b} leave?\n{v} is {a} - {b}.",
                "{a} - {b}?\n{v} is {a} - {b}.",
            ],
            &["What is {a} - {b}?", "Take {b} from {a}."],
        ),
        Task::Larger => (
            &[
                "Of {a} and {b}, {v} is more.",
                "{v} is more than the other of {a} and {b}.",
            ],
            &["Is {a} or {b} more?\n{v} is more."],
            &["Which is larger, {a} or {b}?", "Pick the larger of {a} and {b}."],
        ),
    };
    Wording {
        statements,
        questions,
        chat,
    }
}

fn fill(template: &str, item: &Item) -> String {
    template
        .replace("{a}", &item.a)
        .replace("{b}", &item.b)
        .replace("{v}", &item.answer)
}

/// All plain wordings of an item, statements first; a question and its answer are two lines.
pub fn plain(item: &Item) -> Vec<String> {
    let w = wording(item.task);
    w.statements.iter().chain(w.questions).map(|t| fill(t, item)).collect()
}

/// All chat questions of an item.
pub fn chat(item: &Item) -> Vec<String> {
    wording(item.task).chat.iter().map(|t| fill(t, item)).collect()
}
