// What a test asks about a page: contrast of the texts, what does not fit, and what the keyboard reaches.
"use strict";

(() => {
  const scratch = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  /** Red, green, blue from 0 to 255 and alpha from 0 to 1 of a CSS color. */
  const parts = (color) => {
    scratch.clearRect(0, 0, 1, 1);
    scratch.fillStyle = color;
    scratch.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = scratch.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((x, i) => a * x + (1 - a) * below[i]);
  /** The relative luminance of WCAG 2. */
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((x) => x / 255).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  /** The color behind an element, from the root down. */
  const behind = (element) => {
    const all = [];
    for (let e = element; e; e = e.parentElement) all.push(parts(getComputedStyle(e).backgroundColor));
    return all.reverse().reduce((below, color) => over(color, below), [255, 255, 255]);
  };
  const opacity = (element) => {
    let all = 1;
    for (let e = element; e; e = e.parentElement) all *= Number(getComputedStyle(e).opacity);
    return all;
  };
  /** The texts that a reader sees. */
  const texts = () => {
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const out = [];
    while (walker.nextNode()) {
      const node = walker.currentNode;
      const element = node.parentElement;
      if (!node.data.trim() || element.closest("script, noscript, option")) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      const box = range.getBoundingClientRect();
      if (box.width > 0 && box.height > 0 && element.checkVisibility({ visibilityProperty: true })) out.push([node.data.trim(), element, box]);
    }
    return out;
  };

  window.ftTest = {
    texts: () => texts().length,
    /** Texts with a contrast below 4.5, and colors of curves below 3. */
    pale() {
      const faults = [];
      for (const [text, element] of texts()) {
        const style = getComputedStyle(element);
        const below = behind(element);
        const [r, g, b, a] = parts(element instanceof SVGElement ? style.fill : style.color);
        const ratio = contrast(over([r, g, b, a * opacity(element)], below), below);
        if (ratio < 4.5) faults.push(text.slice(0, 40) + ": " + ratio.toFixed(2));
      }
      const root = getComputedStyle(document.documentElement);
      const plain = (name) => parts(root.getPropertyValue(name).trim()).slice(0, 3);
      for (let n = 0; n < 8; n++) {
        const ratio = contrast(plain("--c" + n), plain("--card"));
        if (ratio < 3) faults.push("curve " + n + ": " + ratio.toFixed(2));
      }
      return faults;
    },
    /** What sticks out of the window, or is cut where it cannot be scrolled to. */
    wide() {
      const width = document.documentElement.clientWidth;
      const faults = [];
      if (document.documentElement.scrollWidth > width) faults.push("the page: " + document.documentElement.scrollWidth);
      for (const [text, element, box] of texts()) {
        // Parts that are wider on purpose scroll by themselves; a title has the whole of a name that is cut in a legend.
        if (element.closest(".wide, .tabs, pre, .legend, .skip")) continue;
        if (box.right > width + 1 || box.left < -1) faults.push(text.slice(0, 40) + ": " + box.left + " to " + box.right);
      }
      return faults;
    },
    /** How light the page is: 0 to 1. */
    light: () => luminance(behind(document.body)),
    /** The element with the focus: what it is, and whether that can be seen. */
    focus() {
      const e = document.activeElement;
      if (!e || e === document.body) return null;
      const box = e.getBoundingClientRect();
      return { what: e.id || e.className.baseVal || e.className || e.tagName.toLowerCase() + " " + e.textContent.slice(0, 20),
        seen: getComputedStyle(e).outlineStyle !== "none" && box.right > 0 && box.width > 0 };
    },
    /** The elements that can be used and never had the focus. */
    unreached() {
      const all = [...document.querySelectorAll("a[href], button, summary, input, select, [tabindex='0']")]
        .filter((e) => e.checkVisibility({ visibilityProperty: true }) && !e.disabled && e.tabIndex >= 0);
      return all.filter((e) => !e.ftReached).map((e) => e.outerHTML.slice(0, 80));
    },
  };
  document.addEventListener("focusin", (e) => { e.target.ftReached = true; });
  return true;
})()
