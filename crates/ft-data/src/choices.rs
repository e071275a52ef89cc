//! The choices of how rows are read: their layout, how they become text, and which tokens are trained.

use ft_base::named;

named!(
    /// The layout of the rows of a file.
    RowFormat {
    Auto = "auto",
    Messages = "messages",
    PromptCompletion = "prompt-completion",
    Alpaca = "alpaca",
    Sharegpt = "sharegpt",
    Text = "text",
    Preference = "preference",
    Prompt = "prompt",
    }
);
named!(
    /// How texts of prompts and answers become one text.
    Render { Auto = "auto", Chat = "chat", Plain = "plain" }
);
named!(
    /// Which tokens of a row are targets.
    TrainOn { Assistant = "assistant", Completion = "completion", All = "all" }
);
named!(
    /// Treatment of rows of more than `max_length` tokens.
    Long {
        /// Rows of plain text are split, others truncated.
        Auto = "auto",
        /// Pieces of `max_length` tokens, each a row.
        Split = "split",
        /// The first `max_length` tokens are kept.
        Truncate = "truncate",
        /// The row is left out.
        Drop = "drop",
    }
);
