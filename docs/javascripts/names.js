// Names and keyboard access that the theme leaves out, for people who hear a page or use
// no mouse. The theme adds buttons and scroll boxes after the page is loaded, so what is
// added is looked at as well.
(() => {
  function nameAll(selector, name) {
    document.querySelectorAll(selector).forEach((element, index) => {
      element.setAttribute("aria-label", index ? `${name} ${index + 1}` : name);
    });
  }

  function complete() {
    nameAll(".md-search", "Search");
    nameAll(".md-code__nav", "Code block");
    const boxes = ".md-typeset__scrollwrap, .md-typeset p:has(> img[src$='recordings.svg'])";
    for (const box of document.querySelectorAll(boxes)) {
      box.tabIndex = 0;
    }
  }

  new MutationObserver(complete).observe(document.body, { childList: true, subtree: true });
  complete();
})();
