//! The processes that render chat templates: started when they are needed, kept for the next conversations.

use super::wire::{JobReader, JobText, RenderRequest};
use super::{ChatTemplate, RenderJob, RenderResult};
use crate::jinja;
use ft_base::worker::{self, Worker, WorkerEnd};
use ft_base::{Error, Result, sync};
use std::collections::HashSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Most processes at one time.
const MOST: usize = 8;
/// Largest response to one conversation, in bytes: the longest text, and 1 MiB for the rest of the response.
const LONGEST: usize = jinja::LONGEST + (1 << 20);

struct Renderer {
    worker: Worker,
    /// Programs that the process has.
    programs: HashSet<u64>,
}

struct RendererPool {
    idle: Vec<Renderer>,
    busy: usize,
}

static POOL: Mutex<RendererPool> = Mutex::new(RendererPool {
    idle: Vec::new(),
    busy: 0,
});
static FREE: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, RendererPool> {
    // Nothing is half done while the lock is held.
    sync::lock(&POOL)
}

pub(super) fn rest() {
    // They end outside of the lock.
    let idle = std::mem::take(&mut lock().idle);
    drop(idle);
}

/// A place among the busy ones, given back when it is dropped.
struct BusyGuard;

impl Drop for BusyGuard {
    fn drop(&mut self) {
        lock().busy -= 1;
        FREE.notify_one();
    }
}

fn take() -> (BusyGuard, Option<Renderer>) {
    let mut pool = lock();
    while pool.busy >= MOST {
        pool = FREE.wait(pool).unwrap_or_else(PoisonError::into_inner);
    }
    pool.busy += 1;
    (BusyGuard, pool.idle.pop())
}

/// Answers of a process; `None`: the conversations are to be rendered in this one.
///
/// Errors: no process could be started, or it ended.
pub(super) fn answers(template: &ChatTemplate, jobs: &[RenderJob]) -> Option<Result<Vec<Vec<RenderResult>>>> {
    if !worker::is_available() {
        return None;
    }
    let (_busy, idle) = take();
    let mut renderer = match idle.map_or_else(Renderer::start, Ok) {
        Ok(renderer) => renderer,
        // The limits of work, text and nesting hold in this process too; those of the other do not.
        Err(e) => return template.without_process(e),
    };
    let mut out = Vec::with_capacity(jobs.len());
    // Neighbors with the same program go in one request.
    let mut rest = jobs;
    while let Some(first) = rest.first() {
        let id = template.program(first.tools).id;
        let same = rest
            .iter()
            .take_while(|job| template.program(job.tools).id == id)
            .count();
        let (group, tail) = rest.split_at(same);
        let before = out.len();
        let mut asked = renderer.ask(template, group, &mut out);
        // A fault of the machine ends a process too, and a long run should survive it: a new process is asked, once.
        if asked.as_ref().is_err_and(AskError::may_pass) {
            out.truncate(before);
            renderer = match Renderer::start() {
                Ok(renderer) => renderer,
                Err(e) => return template.without_process(e),
            };
            asked = renderer.ask(template, group, &mut out);
        }
        if let Err(e) = asked {
            return Some(Err(e.explain()));
        }
        rest = tail;
    }
    lock().idle.push(renderer);
    Some(Ok(out))
}

/// Why a process gave no answers.
enum AskError {
    Ended(WorkerEnd),
    Other(Error),
}

impl From<WorkerEnd> for AskError {
    fn from(why: WorkerEnd) -> Self {
        Self::Ended(why)
    }
}

impl From<Error> for AskError {
    fn from(e: Error) -> Self {
        Self::Other(e)
    }
}

impl Renderer {
    fn start() -> Result<Self> {
        Ok(Self {
            worker: Worker::start()?,
            programs: HashSet::new(),
        })
    }

    fn ask(
        &mut self,
        template: &ChatTemplate,
        jobs: &[RenderJob],
        out: &mut Vec<Vec<RenderResult>>,
    ) -> std::result::Result<(), AskError> {
        let Some(first) = jobs.first() else { return Ok(()) };
        let program = template.program(first.tools);
        let is_new = self.programs.insert(program.id);
        let request = RenderRequest {
            program: program.id,
            source: is_new.then_some(&*program.source),
            variables: &template.tokens,
            jobs: jobs
                .iter()
                .map(|job| JobText {
                    messages: job.messages,
                    tools: job.tools,
                    renderings: &job.renderings,
                })
                .collect(),
        };
        let mut text = vec![0u8; 8];
        serde_json::to_writer(&mut text, &request)
            .map_err(|e| Error::new("a conversation cannot be sent to the process that renders it").cause(e))?;
        let length = (text.len() - 8) as u64;
        text[..8].copy_from_slice(&length.to_le_bytes());
        self.worker.send(&text)?;
        for job in jobs {
            let mut length = [0u8; 8];
            self.worker.receive(&mut length)?;
            let most = job.renderings.len().saturating_mul(LONGEST);
            let length = usize::try_from(u64::from_le_bytes(length)).ok().filter(|n| *n <= most);
            let wrong = || Error::new("the answer of the process that renders chat templates cannot be read");
            let mut answer = vec![0u8; length.ok_or_else(wrong)?];
            self.worker.receive(&mut answer)?;
            out.push(JobReader(&answer).job(job.renderings.len()).ok_or_else(wrong)?);
        }
        Ok(())
    }
}

impl AskError {
    /// True if the same conversations can succeed in a new process. The limits of a process stop a template each time.
    fn may_pass(&self) -> bool {
        use WorkerEnd::{Exit, Signal, Silence};
        matches!(self, Self::Ended(Signal(_) | Exit(_) | Silence))
    }

    fn explain(self) -> Error {
        let why = match self {
            Self::Ended(why) => why,
            Self::Other(e) => return e,
        };
        let stopped = || Error::format(format!("chat template was stopped: it {why}"));
        let silent = || Error::new(format!("no process rendered the chat template: the second one {why}"));
        match why {
            WorkerEnd::Time => stopped()
                .hint("the template has a very long or endless loop: use another one with `ChatTemplate::from_file`"),
            WorkerEnd::Memory | WorkerEnd::Stack => stopped().hint(
                "the template makes too much text, or calls itself too often: use another one with \
                 `ChatTemplate::from_file`",
            ),
            WorkerEnd::Signal(libc::SIGKILL) => silent().hint(
                "the system or a person ended them; the system does so if the memory of the machine or of the job is \
                 full (`dmesg` says it)",
            ),
            WorkerEnd::Silence => {
                silent().hint("the machine may have too little memory or too many processes: look at its load")
            }
            WorkerEnd::Signal(_) | WorkerEnd::Exit(_) => {
                silent().hint("start the run again; if it happens again with the same data, report it")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{RenderedChat, wire};
    use super::*;
    use serde_json::{Map, json};
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::process::Command;
    use std::time::Duration;

    /// A directory with the file `worker`, a script that counts its starts in `starts` and runs the file `way`.
    const DIR: &str = "FT_TEST_WORKER_DIR";

    /// Sets the command of workers and writes their answer. Returns a template to render with them.
    fn template_of_workers(dir: &Path, silence: Duration) -> ChatTemplate {
        worker::set_program(worker::WorkerCommand {
            path: dir.join("worker"),
            variables: vec![("PATH".into(), std::env::var_os("PATH").unwrap_or_default())],
            silence,
        });
        let mut answer = Vec::new();
        let rendered = RenderedChat {
            text: "hi".into(),
            generation: Vec::new(),
        };
        wire::put_job(&mut answer, &[Ok(rendered)]);
        std::fs::write(dir.join("answer"), answer).unwrap();
        ChatTemplate::with_tokens("hi", "t.jinja", Map::new()).unwrap()
    }

    fn render(template: &ChatTemplate) -> std::result::Result<String, String> {
        let rendered = template.render(&[json!({"role": "user", "content": "x"})], None, false);
        rendered.map_err(|e| e.to_string())
    }

    fn starts(dir: &Path) -> usize {
        std::fs::read_to_string(dir.join("starts")).unwrap().lines().count()
    }

    #[test]
    #[ignore = "runs only as the child of a test below"]
    fn renders_with_workers_that_end() {
        let Some(dir) = std::env::var_os(DIR) else { return };
        let dir = Path::new(&dir);
        let template = template_of_workers(dir, worker::SILENCE);
        let render = || render(&template);
        let way = |script: &str| {
            template.rest();
            std::fs::write(dir.join("way"), script).unwrap();
            std::fs::write(dir.join("starts"), "").unwrap();
        };
        let starts = || starts(dir);

        // It answers once and is killed while it is idle.
        way("head -c 8 >request; cat answer; kill -KILL $$");
        for n in 1..=3 {
            assert_eq!(render().as_deref(), Ok("hi"));
            assert_eq!(starts(), n);
        }
        // It is killed, or ends, each time.
        for (script, says) in [
            ("head -c 8 >request; kill -KILL $$", "the memory of the machine"),
            ("head -c 8 >request; exit 3", "ended with code 3"),
        ] {
            way(script);
            let e = render().unwrap_err();
            assert!(
                e.contains("no process rendered the chat template") && e.contains(says) && e.contains("t.jinja"),
                "{e}"
            );
            assert!(!e.contains("loop"), "{e}");
            assert_eq!(starts(), 2, "{script}");
        }
        // What the template does itself is final.
        let out_of_memory = "head -c 8 >request; echo memory allocation of 9 bytes failed >&2; kill -ABRT $$";
        for (script, says) in [
            ("head -c 8 >request; kill -XCPU $$", "endless loop"),
            (out_of_memory, "too much text"),
        ] {
            way(script);
            let e = render().unwrap_err();
            assert!(e.contains("chat template was stopped") && e.contains(says), "{e}");
            assert_eq!(starts(), 1, "{script}");
        }
        std::fs::write(dir.join("passed"), "").unwrap();
    }

    #[test]
    #[ignore = "runs only as the child of a test below"]
    fn renders_with_a_worker_that_is_silent() {
        let Some(dir) = std::env::var_os(DIR) else { return };
        let dir = Path::new(&dir);
        let template = template_of_workers(dir, Duration::from_secs(2));
        std::fs::write(dir.join("starts"), "").unwrap();
        // Only the first one is silent.
        let way = "head -c 8 >request; [ $(wc -l <starts) -gt 1 ] || { echo $$ >silent; exec sleep 600; }; cat answer";
        std::fs::write(dir.join("way"), way).unwrap();
        assert_eq!(render(&template).as_deref(), Ok("hi"));
        assert_eq!(starts(dir), 2);
        let silent: i32 = std::fs::read_to_string(dir.join("silent"))
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        // SAFETY: sends no signal, only asks for the process; touches no memory.
        let found = unsafe { libc::kill(silent, 0) };
        assert_eq!(found, -1, "the silent process is still there");
        std::fs::write(dir.join("passed"), "").unwrap();
    }

    #[test]
    fn a_worker_that_is_silent_is_replaced() {
        in_child("renders_with_a_worker_that_is_silent");
    }

    #[test]
    fn two_silent_workers_are_no_fault_of_the_template() {
        let end = AskError::Ended(WorkerEnd::Silence);
        assert!(end.may_pass());
        let e = end.explain().to_string();
        assert!(
            e.contains("no process rendered the chat template: the second one did not answer for 60 s"),
            "{e}"
        );
        assert!(e.contains("look at its load") && !e.contains("loop"), "{e}");
    }

    #[test]
    fn a_worker_that_was_killed_is_replaced_once() {
        in_child("renders_with_workers_that_end");
    }

    /// Runs a test in a child, because the command of workers is set once for a process.
    fn in_child(test: &str) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("worker");
        let script = "#!/bin/sh\ncd \"${0%/*}\"\necho x >>starts\n. ./way\n";
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
        let out = Command::new(std::env::current_exe().unwrap())
            .arg(format!("template::pool::tests::{test}"))
            .args(["--exact", "--ignored", "--nocapture"])
            .env(DIR, dir.path())
            .output()
            .unwrap();
        let said = [out.stdout, out.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(out.status.success() && dir.path().join("passed").exists(), "{said}");
    }
}
