//! Requests the renderings of many rows at once: a request to the rendering process costs as much as rendering a row.

use super::codec::{ChatRender, RenderJob, RenderedChat};
use super::encode::Encoder;
use super::rows::Sample;
use ft_base::Result;
use serde_json::Value;

/// Rows per request.
pub(super) const ROWS: usize = 64;

/// A chat template with cached renderings of one conversation.
pub(super) struct CachedRenderings<'a> {
    template: &'a dyn ChatRender,
    job: Option<RenderJob<'a>>,
    texts: Vec<Option<RenderedChat>>,
}

/// Returns one for each sample.
pub(super) fn prepare<'a>(
    encoder: &Encoder<'a>,
    template: &'a dyn ChatRender,
    samples: &'a [Result<Sample>],
) -> Vec<CachedRenderings<'a>> {
    let job = |sample: &'a Result<Sample>| match sample {
        Ok(Sample::Chat(chat)) => Some(RenderJob {
            messages: &chat.messages,
            tools: chat.tools.as_ref(),
            renderings: encoder.renderings(chat),
        }),
        _ => None,
    };
    of_jobs(template, samples.iter().map(job).collect())
}

/// One for each job; a place without one asks the template itself.
pub(super) fn of_jobs<'a>(template: &'a dyn ChatRender, jobs: Vec<Option<RenderJob<'a>>>) -> Vec<CachedRenderings<'a>> {
    let given: Vec<RenderJob> = jobs.iter().flatten().cloned().collect();
    let answers = if given.is_empty() {
        Vec::new()
    } else {
        template.render_many(&given)
    };
    let mut answers = answers.into_iter();
    let prepared = |job: Option<RenderJob<'a>>| CachedRenderings {
        template,
        texts: job.as_ref().and_then(|_| answers.next()).unwrap_or_default(),
        job,
    };
    jobs.into_iter().map(prepared).collect()
}

impl CachedRenderings<'_> {
    fn find(&self, messages: &[Value], tools: Option<&Value>, prompt: bool) -> Option<&RenderedChat> {
        let job = self.job.as_ref()?;
        let is_same = std::ptr::eq(messages.as_ptr(), job.messages.as_ptr())
            && messages.len() <= job.messages.len()
            && match (tools, job.tools) {
                (Some(a), Some(b)) => std::ptr::eq(a, b),
                (None, None) => true,
                _ => false,
            };
        let at = job
            .renderings
            .iter()
            .position(|rendering| *rendering == (messages.len(), prompt));
        self.texts.get(at.filter(|_| is_same)?)?.as_ref()
    }
}

impl ChatRender for CachedRenderings<'_> {
    fn render(&self, messages: &[Value], tools: Option<&Value>, add_generation_prompt: bool) -> Result<String> {
        match self.find(messages, tools, add_generation_prompt) {
            Some(rendered) => Ok(rendered.text.clone()),
            None => self.template.render(messages, tools, add_generation_prompt),
        }
    }

    fn render_marked(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<Option<RenderedChat>> {
        // Without a marked range, the cached text may be from a template without such blocks.
        match self.find(messages, tools, add_generation_prompt) {
            Some(rendered) if !rendered.generation.is_empty() => Ok(Some(rendered.clone())),
            _ => self.template.render_marked(messages, tools, add_generation_prompt),
        }
    }
}
