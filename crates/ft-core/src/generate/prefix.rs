//! Finds common prefixes of requests: a tree of token ranges, each computed once.
//!
//! A node is a range of positions that all requests below it share. The last token of a prompt is never in a node:
//! each request computes it itself, to get its own logits.

/// Smallest number of tokens of a node.
pub(crate) const LEAST: usize = 16;

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PrefixNode {
    /// The node with the preceding tokens.
    pub parent: Option<usize>,
    /// Positions `start..end`.
    pub start: usize,
    pub end: usize,
    /// A request that contains these tokens.
    pub request: usize,
    /// Number of requests below the node.
    pub users: usize,
}

#[derive(Debug, Default)]
pub(crate) struct PrefixTree {
    /// Parents come before children.
    pub nodes: Vec<PrefixNode>,
    /// The last node of each request.
    pub of_request: Vec<Option<usize>>,
    /// All requests, ordered such that those below a node are consecutive; otherwise in the given order.
    pub order: Vec<usize>,
}

/// Requests whose first `at` tokens are equal; the first `start` of them are already in nodes.
struct PrefixGroup {
    requests: Vec<usize>,
    start: usize,
    at: usize,
    parent: Option<usize>,
}

impl PrefixTree {
    /// A tree without shared nodes.
    pub(crate) fn apart(requests: usize) -> Self {
        Self {
            nodes: Vec::new(),
            of_request: vec![None; requests],
            order: (0..requests).collect(),
        }
    }

    pub(crate) fn new(prompts: &[&[u32]]) -> Self {
        let mut tree = Self::apart(prompts.len());
        let mut sorted = tree.order.clone();
        sorted.sort_by_key(|&r| prompts[r]);
        let mut groups = vec![PrefixGroup {
            requests: sorted,
            start: 0,
            at: 0,
            parent: None,
        }];
        while let Some(group) = groups.pop() {
            tree.split(prompts, group, &mut groups);
        }
        let mut firsts = vec![usize::MAX; tree.nodes.len()];
        for (request, last) in tree.of_request.iter().enumerate() {
            for node in tree.path(*last) {
                firsts[node] = firsts[node].min(request);
            }
        }
        let key = |&request: &usize| {
            let mut key: Vec<usize> = tree.path(tree.of_request[request]).map(|node| firsts[node]).collect();
            key.reverse();
            key.push(request);
            key
        };
        let mut order = tree.order.clone();
        order.sort_by_cached_key(key);
        tree.order = order;
        tree
    }

    /// Returns the nodes from `last` up to the root.
    pub(crate) fn path(&self, last: Option<usize>) -> impl Iterator<Item = usize> + '_ {
        std::iter::successors(last, |&node| self.nodes[node].parent)
    }

    fn split(&mut self, prompts: &[&[u32]], group: PrefixGroup, groups: &mut Vec<PrefixGroup>) {
        let PrefixGroup {
            requests,
            start,
            at,
            parent,
        } = group;
        let limit = |r: usize| prompts[r].len().saturating_sub(1);
        let first = match requests[..] {
            [] => return,
            [alone] => {
                self.of_request[alone] = parent;
                return;
            }
            [first, ..] => first,
        };
        // The length of the common prefix. The requests are sorted, so comparing neighbors is sufficient.
        let mut common = limit(first);
        for pair in requests.windows(2) {
            let (a, b) = (prompts[pair[0]], prompts[pair[1]]);
            let same = (at..common.min(limit(pair[1]))).take_while(|&i| a[i] == b[i]).count();
            common = at + same;
        }
        let (mut start, mut parent) = (start, parent);
        if common - start >= LEAST {
            self.nodes.push(PrefixNode {
                parent,
                start,
                end: common,
                request: first,
                users: requests.len(),
            });
            (start, parent) = (common, Some(self.nodes.len() - 1));
        }
        // A request that ends here computes its own last token; the others are grouped by their next token.
        let (here, further): (Vec<_>, Vec<_>) = requests.into_iter().partition(|&r| limit(r) == common);
        here.into_iter().for_each(|r| self.of_request[r] = parent);
        for part in further.chunk_by(|&a, &b| prompts[a][common] == prompts[b][common]) {
            groups.push(PrefixGroup {
                requests: part.to_vec(),
                start,
                at: common,
                parent,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(prompts: &[Vec<u32>]) -> PrefixTree {
        let prompts: Vec<&[u32]> = prompts.iter().map(|p| &p[..]).collect();
        let tree = PrefixTree::new(&prompts);
        // Checks the invariants of every tree.
        let mut users = vec![0; tree.nodes.len()];
        for (r, last) in tree.of_request.iter().enumerate() {
            let mut end = last.map_or(0, |n| tree.nodes[n].end);
            assert!(end < prompts[r].len().max(1));
            for n in tree.path(*last) {
                let node = &tree.nodes[n];
                assert_eq!(node.end, end);
                assert_eq!(prompts[r][..end], prompts[node.request][..end]);
                assert!(node.end - node.start >= LEAST && node.parent.is_none_or(|p| p < n));
                users[n] += 1;
                end = node.start;
            }
            assert_eq!(end, 0);
        }
        assert_eq!(users, tree.nodes.iter().map(|n| n.users).collect::<Vec<_>>());
        let mut sorted = tree.order.clone();
        sorted.sort();
        assert!(sorted.into_iter().eq(0..prompts.len()));
        for n in 0..tree.nodes.len() {
            let below: Vec<usize> = (0..prompts.len())
                .filter(|&i| tree.path(tree.of_request[tree.order[i]]).any(|p| p == n))
                .collect();
            assert!(below.windows(2).all(|w| w[1] == w[0] + 1), "{below:?}");
        }
        tree
    }

    fn text(parts: &[(u32, usize)]) -> Vec<u32> {
        parts
            .iter()
            .flat_map(|&(seed, n)| (0..n as u32).map(move |i| seed * 1000 + i))
            .collect()
    }

    #[test]
    fn a_system_prompt_and_groups_below_it() {
        let system = (1, 50);
        let prompts = [
            text(&[system, (2, 30)]),
            text(&[system, (3, 20)]),
            text(&[system, (2, 30)]),
            text(&[(4, 9)]),
            text(&[system, (3, 20)]),
            text(&[system]),
        ];
        let t = tree(&prompts);
        let ranges: Vec<(usize, usize, usize)> = t.nodes.iter().map(|n| (n.start, n.end, n.users)).collect();
        assert_eq!(ranges.len(), 3);
        // One request is the system prompt itself: the prefix shared by all is limited to its tokens except the last.
        assert!(ranges.contains(&(0, 49, 5)));
        assert!(ranges.contains(&(49, 79, 2)) && ranges.contains(&(49, 69, 2)));
        assert_eq!(t.of_request[3], None);
        assert_eq!(t.order, [0, 2, 1, 4, 5, 3]);
    }

    #[test]
    fn short_parts_are_not_shared_and_long_ones_below_them_are() {
        let t = tree(&[
            text(&[(1, 5), (2, 40)]),
            text(&[(1, 5), (2, 30), (3, 9)]),
            text(&[(1, 5), (4, 3)]),
            text(&[(5, 16)]),
            text(&[(5, 16)]),
        ]);
        assert_eq!(t.nodes.len(), 1);
        assert_eq!((t.nodes[0].start, t.nodes[0].end, t.nodes[0].users), (0, 35, 2));
    }

    #[test]
    fn prompts_that_grow_by_a_token_and_odd_ones() {
        let long = text(&[(1, 200)]);
        let growing: Vec<Vec<u32>> = (0..200).map(|n| long[..n].to_vec()).collect();
        let t = tree(&growing);
        assert!(!t.nodes.is_empty() && t.nodes.len() <= 200 / LEAST);
        assert!(tree(&[]).order.is_empty());
        tree(&[vec![], vec![], vec![7], vec![7]]);
        let same = vec![long.clone(); 8];
        let t = tree(&same);
        assert_eq!((t.nodes.len(), t.nodes[0].end, t.nodes[0].users), (1, 199, 8));
    }
}
