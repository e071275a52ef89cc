//! Commands for which the modes of files count, also where root runs the tests.

use std::process::Command;

/// The same command; root gives up its right to read and write whatever the modes say.
pub fn unprivileged(inner: &Command) -> Command {
    let id = Command::new("id").arg("-u").output().unwrap();
    let mut command = if id.stdout.trim_ascii() == b"0" {
        let mut command = Command::new("setpriv");
        command.arg("--bounding-set=-dac_override,-dac_read_search");
        command.arg(inner.get_program());
        command
    } else {
        Command::new(inner.get_program())
    };
    command.args(inner.get_args());
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    if let Some(dir) = inner.get_current_dir() {
        command.current_dir(dir);
    }
    command
}
