// Behaviour beyond htmx, one section each: requests, polling, ages, dialogs, clicks, keys.
// Every page works without this file.
"use strict";
(() => {
  const root = document.documentElement;
  const $ = (selector, from = document) => from.querySelector(selector);
  const $$ = (selector, from = document) => Array.from(from.querySelectorAll(selector));
  const words = () => ($("#words") || { dataset: {} }).dataset;

  // --- requests -------------------------------------------------------------------------------------

  document.addEventListener("htmx:configRequest", (event) => {
    const token = $('meta[name="csrf-token"]');
    if (event.detail.verb !== "get" && token) event.detail.headers["X-CSRF-Token"] = token.content;
  });

  function say(text) {
    const toasts = $("#toasts");
    if (!toasts || !text) return;
    const toast = document.createElement("div");
    toast.className = "toast";
    toast.textContent = text;
    toasts.replaceChildren(toast);
    setTimeout(() => toast.remove(), 6000);
  }

  const failed = (event) => {
    if (event.detail.elt.id === "poller") {
      // A 404 is final: stop polling. After any other error go on.
      if (event.detail.xhr && event.detail.xhr.status === 404) delete event.detail.elt.dataset.poll;
      return markLive("failing");
    }
    say(event.type === "htmx:responseError" ? words().refused : words().unreachable);
  };
  document.addEventListener("htmx:responseError", failed);
  document.addEventListener("htmx:sendError", failed);
  document.addEventListener("htmx:timeout", failed);

  // --- polling: one poller per page ------------------------------------------------------------------

  const PAUSED = "aijobs-paused";
  let lastPoll = Date.now();

  const isPaused = () => sessionStorage.getItem(PAUSED) === "1";
  const pollEvery = () => Number(($("#poller") || { dataset: {} }).dataset.poll || 0) * 1000;

  function markLive(how) {
    const live = $("#live");
    if (!live) return;
    const on = pollEvery() > 0 && !isPaused();
    if (on) live.dataset.live = how || "on";
    else delete live.dataset.live;
    const word = !pollEvery() ? words().settled : isPaused() ? words().paused : how === "failing" ? words().stale : words().live;
    if (live.textContent !== word) live.textContent = word || "";
    live.setAttribute("aria-pressed", String(on));
    live.disabled = !pollEvery();
  }

  function poll() {
    const every = pollEvery();
    if (!every || isPaused() || document.hidden || $("dialog[open]")) return;
    if (Date.now() - lastPoll < every) return;
    lastPoll = Date.now();
    window.htmx.trigger($("#poller"), "aijobs:poll");
  }

  document.addEventListener("htmx:afterRequest", (event) => {
    if (event.detail.elt.id === "poller") {
      lastPoll = Date.now();
      if (event.detail.successful) markLive("on");
    }
  });

  function togglePause() {
    if (!pollEvery()) return;
    sessionStorage.setItem(PAUSED, isPaused() ? "0" : "1");
    lastPoll = 0;
    markLive("on");
  }

  // --- ages: rendered by the server, updated here ---------------------------------------------------

  const UNITS = [["year", 31536000], ["month", 2592000], ["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];

  function age(seconds, format) {
    const size = Math.abs(seconds);
    if (size < 1) return words().now;
    const [unit, length] = UNITS.find(([, n]) => size >= n);
    return format.format(Math.sign(seconds) * Math.floor(size / length), unit);
  }

  function refreshAges() {
    const format = new Intl.RelativeTimeFormat(root.lang || "en", { style: "narrow" });
    for (const time of $$("time[data-age]")) {
      const text = age((Date.parse(time.dateTime) - Date.now()) / 1000, format);
      if (time.textContent !== text) time.textContent = text;
    }
  }

  // --- dialogs --------------------------------------------------------------------------------------

  let openedBy = null;

  document.addEventListener("htmx:beforeRequest", (event) => {
    if (event.detail.target && event.detail.target.id === "dialog") openedBy = event.detail.elt.id;
  });

  document.addEventListener("htmx:afterSwap", (event) => {
    if (event.detail.target.id === "dialog" && !event.detail.target.open) event.detail.target.showModal();
    if (event.detail.target.id !== "poller") refreshAges();
  });

  document.addEventListener("htmx:afterSettle", () => markLive("on"));

  function closeDialogs() {
    for (const dialog of $$("dialog[open]")) dialog.close();
    const back = openedBy && document.getElementById(openedBy);
    if (back) back.focus();
    openedBy = null;
  }

  $$("dialog").forEach((dialog) => dialog.addEventListener("close", closeDialogs));

  // --- clicks ---------------------------------------------------------------------------------------

  async function copy(button) {
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
    } catch {
      const text = document.createElement("textarea");
      text.value = button.dataset.copy;
      document.body.append(text);
      text.select();
      document.execCommand("copy");
      text.remove();
      button.focus();
    }
    button.dataset.copied = "";
    say(words().copied);
    setTimeout(() => delete button.dataset.copied, 1500);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button && button.dataset.copy !== undefined) copy(button);
    if (button && button.id === "live") togglePause();
    if (button && button.id === "show-keys") $("#keys").showModal();
    const close = event.target.closest("[data-close]");
    if (close && close.closest("dialog[open]")) {
      event.preventDefault();
      closeDialogs();
    }
    for (const menu of $$("details.menu[open]")) if (!menu.contains(event.target)) menu.open = false;
  });

  // Ignore a second submit while the first is running. The server creates one child anyway.
  document.addEventListener("submit", (event) => {
    if (!event.target.matches("[data-once]")) return;
    if (event.target.dataset.sent) event.preventDefault();
    event.target.dataset.sent = "1";
  });
  window.addEventListener("pageshow", () => $$("[data-sent]").forEach((form) => delete form.dataset.sent));

  // --- keys -----------------------------------------------------------------------------------------

  const KEYS_OFF = "aijobs-keys-off";
  let afterG = 0;

  function moveRow(by) {
    const rows = $$("[data-row]");
    if (!rows.length) return;
    const at = rows.findIndex((row) => row.hasAttribute("data-current"));
    const next = at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + by));
    rows.forEach((row) => row.removeAttribute("data-current"));
    rows[next].setAttribute("data-current", "");
    const link = $("[data-open]", rows[next]);
    if (link) link.focus();
    rows[next].scrollIntoView({ block: "nearest" });
  }

  function press(selector) {
    const element = $(`[data-row][data-current] ${selector}`) || $(`main ${selector}`);
    if (element && element.getAttribute("aria-disabled") !== "true") element.click();
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (event.key === "Escape") {
      $$("details.menu[open]").forEach((menu) => { menu.open = false; });
      if (event.target.id === "search") event.target.blur();
      return;
    }
    // A dialog that has just closed may keep the focus for a moment.
    const field = event.target.closest("input, select, textarea, dialog[open], [contenteditable]");
    if (field && !field.closest("dialog:not([open])")) return;
    if (localStorage.getItem(KEYS_OFF) === "1" && event.key !== "?") return;
    const going = Date.now() - afterG < 1500 && $(`[data-go="${CSS.escape(event.key)}"]`);
    afterG = event.key === "g" ? Date.now() : 0;
    if (going) going.click();
    else if (event.key === "/") $("#search").focus();
    else if (event.key === "j") moveRow(1);
    else if (event.key === "k") moveRow(-1);
    else if (event.key === "Enter" && event.target === document.body) press("[data-open]");
    else if (event.key === "r") press('[data-action="retry"]');
    else if (event.key === "c") press('[data-action="cancel"]');
    else if (event.key === "p") togglePause();
    else if (event.key === "?") $("#keys").showModal();
    else return;
    if (event.key !== "Enter" || event.target === document.body) event.preventDefault();
  });

  const keysOff = $("#keys-off");
  if (keysOff) {
    keysOff.checked = localStorage.getItem(KEYS_OFF) === "1";
    keysOff.addEventListener("change", () => localStorage.setItem(KEYS_OFF, keysOff.checked ? "1" : "0"));
  }

  // --- start ----------------------------------------------------------------------------------------

  refreshAges();
  markLive("on");
  setInterval(poll, 500);
  setInterval(refreshAges, 5000);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) { refreshAges(); poll(); } });
})();
