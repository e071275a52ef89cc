//! The codes of errors: one row for each fault that users meet, and one for each class of other errors. `ft explain` prints
//! a row, `docs/troubleshooting.md` has them all.
//!
//! A row is found by the class of the error and a part of its message, so an error needs no code where it is made; a test
//! compares the parts with the messages in the sources. A code stays when the message changes, and is never used again.

use crate::base::{Error, ErrorKind};
use ErrorKind::{
    Argument, Failed, Format, Internal, Io, Network, NonFinite, NotFound, OutOfMemory, Shape, Signal, Unsupported,
    Usage,
};

/// The meaning of a code.
#[derive(Debug)]
pub struct ErrorCode {
    pub code: &'static str,
    /// The fault in a few words.
    pub title: &'static str,
    pub cause: &'static str,
    pub remedy: &'static str,
    /// The class of the errors with this code; of `Signal` any.
    pub class: ErrorKind,
    /// Parts of their messages; none: all other errors of the class.
    pub parts: &'static [&'static str],
}

macro_rules! codes {
    ($($code:literal $class:expr, $title:literal, [$($part:literal),*], $cause:literal, $remedy:literal;)+) => {
        &[$(ErrorCode {
            code: $code, title: $title, cause: $cause, remedy: $remedy, class: $class, parts: &[$($part),*],
        }),+]
    };
}

/// All codes, in their order: the first row that fits an error is its code.
pub const CODES: &[ErrorCode] = codes! {
    "FT101" Usage, "several errors in a recipe", ["the recipe has "],
        "The recipe, or the `key=value` arguments, have more than one mistake. All are listed, in the order of the file.",
        "Correct them one after the other: each has its line and a hint. `ft plan RECIPE` checks again and trains nothing.";
    "FT102" Usage, "unknown key or table", ["unknown key `", "unknown table `["],
        "A key is misspelled, stands in another table, or has another name than in the tool that it comes from.",
        "Use the key of the hint. `ft recipes schema` prints all keys, also for completion in editors (as a page: `docs/recipe.md`); `ft \
         import FILE` translates configurations of other tools.";
    "FT103" Usage, "wrong type of a value", ["has the wrong type", "has an item of the wrong type"],
        "A number is written in quotes, a list as a text, or the like.",
        "Write the value as the error expects it: `8`, `\"text\"`, `true`, `[\"a\", \"b\"]`. An argument needs no quotes: `train.seed=1`.";
    "FT104" Usage, "value out of range", ["is out of range"],
        "The number cannot work, such as a negative rank or a fraction above 1.",
        "Take a value in the range that the error names. Without the key its default is used.";
    "FT105" Usage, "not one of the values of a key", ["is not a value of `"],
        "The key accepts certain names only.",
        "Take one of the names in the error. `ft recipes schema` explains them (as a page: `docs/recipe.md`).";
    "FT106" Usage, "the recipe is not TOML", ["is not valid TOML", "a recipe is TOML, and this is "],
        "The file has a mistake in its syntax, or is a configuration of another tool in YAML or JSON.",
        "Look at the line of the error: texts need quotes, tables are `[name]`. `ft import FILE` makes a recipe of another tool's file.";
    "FT107" Usage, "keys contradict each other", ["contradict each other"],
        "Two values ask for opposite things.",
        "Keep one of them, as the hint says. `docs/composition.md` lists what combines with what.";
    "FT108" Usage, "no recipe", ["there is no recipe `", "no recipe is given", "recipe is a directory", "two recipes are given"],
        "The command needs the path of one recipe.",
        "Give the file: `ft train my.toml`. `ft recipes` lists recipes, `ft recipes copy NAME` writes one, `ft init` asks four questions.";
    "FT109" Usage, "a required key is missing",
        ["`model.path` is missing", "`data.train` is missing", "`rlhf.rewards` is missing", "needs a teacher", "there are no rows to evaluate on"],
        "The stage cannot run without this key.",
        "Write it as in the hint, in the recipe or as an argument: `model.path=Qwen/Qwen3-0.6B`.";
    "FT110" Usage, "not a flag, not `key=value`", ["argument is not `key=value`", "has no flag `"],
        "Values of a recipe are written without dashes: `train.max_steps=20`.",
        "Write `key=value`. `--help` after a command shows its flags.";
    "FT199" Usage, "wrong use of a command or key", [],
        "The command line or the recipe asks for something that does not exist or has no effect.",
        "Follow the hint; `--help` after a command has examples, `ft recipes schema` all keys (as a page: `docs/recipe.md`).";

    "FT201" Format, "a row or file is not valid JSON or CSV",
        ["the row is not valid JSON", "the file is not valid JSON", "the row is not an object", "a quote opens a text",
        "the row and the header have different numbers of columns", "two columns are named `"],
        "A line of a JSONL file is cut, has a stray character, or is not an object `{...}`. In a CSV file a quote is not closed, or a row has \
         more or fewer columns than the header.",
        "Correct the line that the error names (file, line, column). JSONL has one object in one line, a JSON file is one list of objects. In \
         CSV put a text with commas, quotes or line breaks in quotes, and double the quotes inside it.";
    "FT202" Format, "many rows cannot be used", ["rows cannot be used", "none of the first "],
        "More than one row is bad. The first ten are listed with their places, the others are counted.",
        "Correct or remove them. If all rows are bad, `data.format` or `data.columns` does not fit the file.";
    "FT203" Format, "format of the rows not known",
        ["cannot determine", "the rows can be read in two ways", "the rows are not of format `"],
        "The columns have none of the names that ft reads, or fit two formats.",
        "Set `data.format`, or map the names: `data.columns = { prompt = \"question\", completion = \"reply\" }`. `docs/data.md` has an \
         example of each format.";
    "FT204" Format, "no rows", ["the data has no rows", "no row is left to train"],
        "The files are empty, or every row was dropped by a filter or as too long.",
        "`ft data --recipe R --stats` shows what was dropped and why. Then: `data.long`, `data.max_length`, `data.dedup`, the filters.";
    "FT205" Format, "no trained token", ["nothing in the data would be trained", "nothing in the first rows of the data would be trained"],
        "The loss is computed on answers only, and no row has one within `data.max_length`.",
        "`ft data --recipe R` marks the trained tokens. Raise `data.max_length`, or set `data.train_on = \"all\"` for plain texts.";
    "FT206" Format, "an answer has no tokens", ["the conversation is empty", "an assistant turn has no tokens", "the row has no answer after its prompt"],
        "A conversation has no message, or its answer is empty after the chat template.",
        "Remove the row, or give it an answer. `ft data --recipe R` shows the rendered text.";
    "FT207" Format, "the chat template failed", ["chat template refuses this conversation", "chat template failed", "chat template was stopped"],
        "The template of the model accepts only certain conversations, for example no system message, or user and assistant in turn.",
        "Change the row, or give another template with `data.chat_template`. `docs/templates.md` says what is supported.";
    "FT208" Format, "not a preference row",
        ["this is not a preference row", "`chosen` and `rejected`", "the prompt and `"],
        "DPO and reward training need pairs: a prompt, a better and a worse answer, which differ.",
        "Write `prompt`, `chosen` and `rejected`, or map other names with `data.columns`. `docs/preference.md` has examples.";
    "FT209" Format, "a value of a row has the wrong type", ["has the wrong type", "the row has no `", "` is not a text", "have a `margin`"],
        "A column is missing in this row, or holds a number or a list where a text belongs.",
        "Correct the row that the error names, or map the right column with `data.columns`.";
    "FT210" Format, "a row is too long", ["the row is too long", "the prompt and its answer do not fit", "the prompt is so long"],
        "The prompt leaves too little of `data.max_length` for its answer; or one line is larger than ft reads.",
        "Raise `data.max_length`, shorten the prompt, or drop such rows with `data.long = \"drop\"`.";
    "FT211" Unsupported, "rows that this stage cannot train on",
        ["this stage cannot train on rows of format", "this stage trains on pairs", "rows with images, videos or sounds", "unknown kind of data file"],
        "The stage needs rows of another form, or the file is of another kind.",
        "Take the stage that fits the rows (`docs/choosing.md`), or convert them: JSONL, JSON, CSV, Parquet and Arrow are read.";
    "FT212" NotFound, "no data file", ["no data file matches the pattern"],
        "The pattern in `data.train` or `data.eval` matches nothing. It is relative to the current directory.",
        "`ls` the pattern in the directory where ft starts.";
    "FT213" Failed, "a reward cannot be computed",
        ["needs the right answer of each row", "no known answer has a number", "the schema keyword", "of the schema has the wrong type",
        "does not contain a reward model", "reward program cannot be started", "the reward program ended", "the reward program did not write",
        "the reward program wrote", "the reward program writes"],
        "The rows have no right answer for `exact` or `numeric`, a schema uses a keyword that ft does not have, a directory has no reward \
         model, or a reward program failed.",
        "Follow the hint: `rlhf.answer_column` names the column of the answers. Run a reward program alone, with a row as one line of JSON on its \
         standard input. `docs/rlhf.md` describes each reward.";

    "FT301" NotFound, "the directory is not a model", ["model directory has no `config.json`", "directory contains no weights"],
        "A model directory has `config.json`, `tokenizer.json` and safetensors files.",
        "Give the directory with these files; of a run, that is `runs/NAME/final`.";
    "FT302" NotFound, "weight files are missing", ["weight files are missing"],
        "The index names shards that are not there: a download or a copy was interrupted.",
        "Copy or download the missing files. A download of ft goes on where it stopped.";
    "FT303" Format, "a Git LFS pointer instead of a file", ["this is a Git LFS pointer"],
        "The repository was cloned without its large files.",
        "`git lfs pull` in that directory, or give the hub id to ft, which downloads the files.";
    "FT304" Format, "a damaged safetensors file", ["safetensors header", "file is too short to be safetensors", "is in two shards"],
        "The file was cut or changed.",
        "Download or copy it again, and compare its size with the original.";
    "FT305" Format, "a tensor does not fit the config", ["tensor `"],
        "`config.json` and the weight files belong to different models, or the family stores its weights in another way.",
        "Take both from the same revision. `ft models` lists the supported families.";
    "FT306" NotFound, "no tokenizer", ["model directory has no `tokenizer.json`"],
        "ft reads `tokenizer.json`. Old models have only `tokenizer.model` or `vocab.json`.",
        "In Python: `AutoTokenizer.from_pretrained(\"...\").save_pretrained(\"DIR\")` writes it.";
    "FT307" Unsupported, "a model that ft does not know", ["model type", "model_type"],
        "The family has parts that ft does not compute. A wrong result would be worse than an error.",
        "`ft models` lists the families. The error says what is missing.";
    "FT308" Failed, "model and adapter are mixed up",
        ["this is an adapter, not a complete model", "this is a complete model, not an adapter", "this is a checkpoint, not an adapter"],
        "The command needs a model where an adapter is given, or the other way round.",
        "`ft generate --model ADAPTER` loads the base by itself; `ft merge --adapter ADAPTER --out DIR` makes a complete model; `ft \
         export RUN --out DIR` makes either from a checkpoint.";
    "FT309" Failed, "no model there", ["no model in this directory", "the model is a file, not a directory", "this run has neither `final/` nor a checkpoint"],
        "The path is a directory without a model, or a run that has saved nothing yet.",
        "`ft runs` lists the runs and their state; `ls` the directory.";
    "FT310" Unsupported, "an adapter that ft does not know", ["adapter uses `"],
        "The adapter was trained with an option of PEFT that changes the mathematics and that ft does not have.",
        "`[tune.lora]` in `docs/recipe.md` (`ft recipes schema`) lists the supported options. Merge it in the tool that wrote it, and train on the result.";
    "FT311" Failed, "another base model", ["the adapters belong to different base models", "the base model differs from the model", "adapter was trained on another base model"],
        "An adapter or a checkpoint fits only the weights on which it was trained.",
        "Give the base model and revision that `adapter_config.json` or `resolved.toml` of the run names.";
    "FT399" Format, "a file does not have the form that it must have", [],
        "It is damaged, cut, of another version, or of another kind.",
        "The error names the file and the place. Download, copy or write it again.";
    "FT398" NotFound, "something does not exist", [],
        "A path is misspelled or relative to another directory, or a name does not exist in the model.",
        "Follow the hint; paths are relative to the directory where ft starts, hub ids have one `/`.";

    "FT401" Failed, "the run does not fit the memory", ["the run does not fit the "],
        "The forecast peak is above the budget or the free memory. Nothing was loaded yet.",
        "`ft plan --recipe R` shows the parts. ft already recomputes activations, moves weights to the host or the disk, and at last quantizes \
         frozen weights, unless the recipe sets `memory.activations`, `memory.tier` or `memory.frozen_weights`: first remove values such as \
         `keep`, `device` and `bf16`. Then make the changes that the error lists: a smaller `train.batch_size` with more \
         `train.gradient_accumulation_steps`, `optimizer.state = \"int8\"`, a smaller `data.max_length`, `tune.method = \"block\"` or \
         `\"lora\"`.";
    "FT402" Failed, "the run used more memory than its budget", ["the run used more memory than its budget"],
        "The measured peak passed `memory.budget`. The run stopped after saving its state.",
        "`ft train R --resume` with a larger `memory.budget`, or without one. `docs/memory.md` says what the forecast counts.";
    "FT499" OutOfMemory, "the device is out of memory", [],
        "Another program uses the memory of the GPU, or the forecast was too low.",
        "`nvidia-smi` shows who uses it. Set `memory.budget` below what is free; then as for FT401.";

    "FT403" Failed, "the GPU failed", ["the GPU failed"],
        "The driver answered with an error: the device is gone from the bus, its memory has a fault, or a kernel read a wrong address.",
        "The checkpoints are whole: `--resume` continues from the newest. If it fails again on the same step, report it with the text of the \
         error; if it fails elsewhere, look at `nvidia-smi -q` and `dmesg` (Xid): the device, its cooling or its power.";
    "FT501" NonFinite, "the loss is not finite", ["the loss is not finite"],
        "The learning rate is too high, the dtype is too narrow (f16), or a weight of the model is already NaN or infinite.",
        "A rate 3 to 10 times lower, `train.max_grad_norm = 1.0`, warmup steps, `model.dtype = \"bf16\"`. Resume from a checkpoint before \
         the step: the weights were not changed by it.";
    "FT502" NonFinite, "a gradient is not finite", ["gradient is not finite"],
        "As FT501, in the backward pass.",
        "As FT501. The error names the parameter.";
    "FT503" NonFinite, "too large for f16", ["too large for f16"],
        "Values of this model are beyond 65,504, whatever the loss scale.",
        "`model.dtype = \"bf16\"` or `\"f32\"`.";
    "FT504" Usage, "the learning rate is 0", ["learning rate is 0", "has a learning rate above 0"],
        "The schedule or the value leaves no step that changes a weight.",
        "Set `optimizer.learning_rate`, or fewer warmup steps than steps of the run.";
    "FT599" NonFinite, "a number is not finite", [],
        "A tensor of the model or a result is NaN or infinite.",
        "Check the file that the error names against its source; otherwise as FT501.";

    "FT601" Usage, "an earlier run is in the output directory", ["the output directory holds an earlier run"],
        "ft never overwrites a run by itself.",
        "`--resume` continues it, `--overwrite` removes it, `train.output_dir=runs/other` begins beside it.";
    "FT602" Usage, "other files are in the output directory", ["files that are not a run of ft", "output directory is not empty", "but this path is a file", "the directory contains other files"],
        "The directory has files that ft did not write.",
        "Name a new directory.";
    "FT603" Failed, "nothing to resume", ["the directory has no run to resume", "there is no checkpoint to resume from", "has no checkpoint to resume from"],
        "The directory has no run, the run is finished and has no checkpoints, or the path that was given has none.",
        "Start a new run without `--resume`; `--overwrite` replaces a finished run. `train.save_steps` sets how often the state is saved.";
    "FT604" Failed, "a damaged checkpoint", ["checkpoint manifest is damaged", "checkpoint file is missing", "checkpoint file is damaged"],
        "A file does not have the hash that was stored with it.",
        "`ft train R --resume --allow-older` continues from the newest one that is whole. `ft runs verify RUN` checks all.";
    "FT605" Failed, "the run to resume is another one", ["the settings or inputs differ from the saved run", "written by another version of ft"],
        "A resumed run is bit-equal to one that never stopped, so recipe, model and rows must be the same.",
        "Undo the differences that are listed, or begin a new run in another directory from `final/` or an export.";
    "FT606" Failed, "another run is in progress", ["another run is in progress in this directory", "the run directory was moved or removed", "another process has locked the run directory in the meantime"],
        "Two processes must not write the same run.",
        "Wait for the other one or stop it (its process is in the error), or set `train.output_dir`. If both are tasks of one `srun`, they found no MPI: `srun --mpi=pmix`.";
    "FT607" Usage, "no run there", ["this is not a run directory", "there is no run in this directory", "there is no such directory"],
        "The path has no `resolved.toml` and `events.jsonl`, which a run writes first.",
        "`ft runs` lists the runs in `runs`; give a run, or a directory with runs.";
    "FT608" Signal(0), "stopped by a signal", [],
        "Ctrl-C, `kill` or the end of a job. The state was saved first; the exit code is 128 + the signal.",
        "`ft train R --resume` continues bit-equal.";

    "FT701" Io, "the disk is full", ["not enough disk space", "the disk has no room", "no room for more files", "larger than the limit of this process"],
        "The file system, a quota or a limit has no room for what will be written. It is checked before a run and before each checkpoint.",
        "Free space, set `train.save_total_limit`, or another `train.output_dir`. `ft plan` shows the bytes on the disk.";
    "FT799" Io, "the system refuses a file", [],
        "Permissions, a failing disk, or a file system that is gone.",
        "The cause in the error is that of the system: `ls -l` the path, `df` its file system.";

    "FT801" Network, "the hub cannot be reached", ["cannot reach the hub"],
        "No network, a proxy, or a wrong `HF_ENDPOINT`.",
        "`ft doctor` tests the connection. Without a network: `HF_HUB_OFFLINE=1` with files in the cache, or a local directory.";
    "FT802" Network, "access to a repository is refused", ["` is gated", "the hub does not allow this token"],
        "The repository needs an account that accepted its terms, or the token cannot read or write it.",
        "Accept the terms on its page; set `HF_TOKEN` to a token of that account. `ft push` needs a token with write access.";
    "FT803" NotFound, "not on the hub", ["it is private or gated", "has no revision `", "the hub has no ", "has no file `"],
        "The id, the revision or the file is misspelled, or the repository is private: a hub says the same of both.",
        "Check the id on the hub's page; set `HF_TOKEN` for private repositories.";
    "FT804" NotFound, "not in the local cache", ["is not in the local cache"],
        "ft works offline, and the files were not downloaded completely before.",
        "Unset `HF_HUB_OFFLINE`, or give a local directory.";
    "FT805" Network, "the hub limits requests", ["the hub limits the request rate"],
        "Too many requests from this address.",
        "Wait some minutes, or set `HF_TOKEN`: the limit is higher for accounts.";
    "FT899" Network, "the hub failed", [],
        "The hub, a mirror or a proxy answered something that is not usable.",
        "Try again: what was downloaded or uploaded is kept. Another `HF_ENDPOINT`, if it is a mirror.";

    "FT901" Internal, "a bug in ft", [],
        "An internal state is inconsistent, or ft panicked (exit code 70).",
        "Report it with the message, the command and the output of `ft doctor --json`.";
    "FT902" Unsupported, "not supported", [],
        "The request is valid, but ft, this build or this machine cannot do it. The error says why.",
        "Follow the hint. `docs/composition.md` lists what combines with what, `ft doctor` what this machine has.";
    "FT903" Argument, "a value that cannot work", [],
        "A setting is out of its range for this model or these rows.",
        "The error names the setting, the value and what is expected.";
    "FT904" Shape, "a tensor has another shape", [],
        "The weights, an adapter or a teacher do not fit the model.",
        "Check that both belong to the same base model and revision. If they do, report it.";
    "FT999" Failed, "other failures", [],
        "An operation failed. The error says what, where and, if known, why.",
        "Follow the hint. If there is none: `ft doctor`, and a report with its output.";
};

/// The code of an error.
pub fn of(error: &Error) -> &'static ErrorCode {
    let alike = |code: &ErrorCode| match (code.class, error.kind()) {
        (Signal(_), Signal(_)) => true,
        (class, kind) => class == kind,
    };
    // The message of several errors is a list of messages.
    let first = error.what().lines().next().unwrap_or_default();
    let fits = |code: &&ErrorCode| alike(code) && code.parts.iter().any(|part| first.contains(part));
    let rest = |code: &&ErrorCode| alike(code) && code.parts.is_empty();
    let found = CODES.iter().find(fits).or_else(|| CODES.iter().find(rest));
    // Every class has a row without parts; a test looks.
    found.unwrap_or(&CODES[CODES.len() - 1])
}

/// The code of arguments that clap refuses.
pub fn of_arguments(error: &clap::Error) -> &'static ErrorCode {
    let message = match error.kind() {
        clap::error::ErrorKind::UnknownArgument => "the command has no flag `",
        _ => "",
    };
    of(&Error::usage(message))
}

/// The row of a code as the user types it: `FT102`, `ft102`, `102`.
pub fn find(typed: &str) -> Option<&'static ErrorCode> {
    let typed = typed.trim().to_uppercase();
    CODES
        .iter()
        .find(|c| c.code == typed || c.code.strip_prefix("FT") == Some(typed.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn codes_are_unique_and_every_class_has_one() {
        let names: BTreeSet<&str> = CODES.iter().map(|c| c.code).collect();
        assert_eq!(names.len(), CODES.len());
        for class in [
            Usage,
            Io,
            Format,
            Shape,
            Argument,
            NotFound,
            NonFinite,
            OutOfMemory,
            Network,
            Unsupported,
            Internal,
            Failed,
            Signal(15),
        ] {
            let code = of(&Error::of(class, "no row has this text"));
            assert!(
                code.parts.is_empty() && (code.class == class || class == Signal(15)),
                "{class:?}: {code:?}"
            );
        }
        for code in CODES {
            let number = code.code.strip_prefix("FT").unwrap();
            assert!(number.len() == 3 && number.parse::<u16>().is_ok(), "{}", code.code);
            for text in [code.cause, code.remedy] {
                assert!(text.ends_with('.') && text.len() > 10, "{}: {text}", code.code);
            }
            // A part that an earlier row of its class has too would never be found.
            for part in code.parts {
                assert_eq!(of(&Error::of(code.class, *part)).code, code.code, "{part}");
            }
        }
        assert_eq!(find("ft102").unwrap().code, "FT102");
        assert_eq!(find("102").unwrap().code, "FT102");
        assert!(find("FT1").is_none());
    }

    #[test]
    fn a_list_of_errors_has_the_code_of_its_heading() {
        let error = Error::usage("the recipe has 2 errors\n\nerror: unknown key `a`");
        assert_eq!(of(&error).code, "FT101");
        assert_eq!(of(&Error::format("field `x` has the wrong type")).code, "FT209");
    }
}
