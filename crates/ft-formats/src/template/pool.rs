//! The processes that render chat templates: started when they are needed, kept for the next conversations.

use super::wire::{JobReader, JobText, RenderRequest};
use super::{ChatTemplate, RenderJob, RenderResult};
use crate::jinja;
use ft_base::worker::{self, Worker};
use ft_base::{Error, Result};
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
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
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
    let renderer = idle.map_or_else(
        || {
            Worker::start().map(|worker| Renderer {
                worker,
                programs: HashSet::new(),
            })
        },
        Ok,
    );
    let mut renderer = match renderer {
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
        if let Err(e) = renderer.ask(template, group, &mut out) {
            return Some(Err(e));
        }
        rest = tail;
    }
    lock().idle.push(renderer);
    Some(Ok(out))
}

impl Renderer {
    fn ask(&mut self, template: &ChatTemplate, jobs: &[RenderJob], out: &mut Vec<Vec<RenderResult>>) -> Result<()> {
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
                    asks: &job.asks,
                })
                .collect(),
        };
        let mut text = vec![0u8; 8];
        serde_json::to_writer(&mut text, &request)
            .map_err(|e| Error::new("a conversation cannot be sent to the process that renders it").cause(e))?;
        let length = (text.len() - 8) as u64;
        text[..8].copy_from_slice(&length.to_le_bytes());
        self.worker.send(&text).map_err(stopped)?;
        for job in jobs {
            let mut length = [0u8; 8];
            self.worker.receive(&mut length).map_err(stopped)?;
            let most = job.asks.len().saturating_mul(LONGEST);
            let length = usize::try_from(u64::from_le_bytes(length)).ok().filter(|n| *n <= most);
            let wrong = || Error::new("the answer of the process that renders chat templates cannot be read");
            let mut answer = vec![0u8; length.ok_or_else(wrong)?];
            self.worker.receive(&mut answer).map_err(stopped)?;
            out.push(JobReader(&answer).job(job.asks.len()).ok_or_else(wrong)?);
        }
        Ok(())
    }
}

fn stopped(why: worker::WorkerEnd) -> Error {
    let limit = "the template has a very long or endless loop: use another one with `ChatTemplate::from_file`";
    Error::format(format!("chat template was stopped: it {why}")).hint(limit)
}
