"use strict";
const root = document.documentElement;
const recall = (key) => { try { return sessionStorage.getItem(key) } catch { return null } };
const keep = (key, value) => { try { sessionStorage.setItem(key, value) } catch { /* a file may not */ } };

// Light or dark: as the system, or as chosen. Figures read their colors from CSS when they are painted.
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
const repaint = () => { for (const view of Object.values(Bokeh.index)) paint(view) };
const paint = (view) => { view.invalidate_layout?.(); view.request_paint?.("everything"); view.request_repaint?.(); view.repaint?.() };
const theme = (name) => { root.dataset.theme = name; keep("theme", name); repaint() };
if (recall("theme")) root.dataset.theme = recall("theme");
document.getElementById("theme").addEventListener("click", () => theme(dark() ? "light" : "dark"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

// Figures are drawn when they come near the screen, and the others while nothing else is to do.
const waiting = new Set(document.querySelectorAll(".plot"));
const draw = async (place) => {
  if (!waiting.delete(place)) return;
  const text = document.getElementById(`item-${place.dataset.item}`).textContent;
  await Bokeh.embed.embed_item(JSON.parse(text), place);
};
const near = new IntersectionObserver((seen) => {
  for (const one of seen) if (one.isIntersecting) { near.unobserve(one.target); draw(one.target) }
}, { rootMargin: "600px" });
for (const place of waiting) near.observe(place);
const folded = (place) => place.closest("details:not([open])");
const rest = async () => {
  for (const place of [...waiting]) if (!folded(place)) { near.unobserve(place); await draw(place); await new Promise((done) => setTimeout(done, 15)) }
  root.dataset.drawn = "all";
};
addEventListener("load", () => setTimeout(rest, 60));
addEventListener("beforeprint", () => { for (const place of [...waiting]) if (!folded(place)) draw(place) });

// Where one is.
const sections = [...document.querySelectorAll("main section")];
const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
const here = () => {
  const current = sections.findLast((section) => section.getBoundingClientRect().top < 120);
  for (const [name, link] of links) link.classList.toggle("here", name === current?.id);
};
addEventListener("scroll", here, { passive: true });
here();
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|TEXTAREA/.test(event.target.tagName)) return;
  if (event.key === "t") theme(dark() ? "light" : "dark");
  const step = { n: 1, p: -1 }[event.key];
  if (!step) return;
  const at = sections.findLastIndex((section) => section.getBoundingClientRect().top < 120);
  const next = sections[Math.max(0, Math.min(sections.length - 1, at + step))];
  next.scrollIntoView(); next.focus({ preventScroll: true });
});

// A live report loads itself again when its run has more to tell.
const live = document.getElementById("live");
if (live) {
  addEventListener("load", () => scrollTo(0, Number(recall("scroll") ?? 0)));
  const ask = async () => {
    try {
      const said = await (await fetch("state")).text();
      live.classList.remove("lost"); live.textContent = "live";
      if (live.dataset.state && said !== live.dataset.state) { keep("scroll", scrollY); location.reload() }
      live.dataset.state ||= said;
    } catch { live.classList.add("lost"); live.textContent = "not served any more" }
  };
  ask(); setInterval(ask, 2000);
}
