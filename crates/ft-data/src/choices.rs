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
