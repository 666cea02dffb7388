// The stream of frames: opens it, tells when it is broken, and opens it again with back-off.
// A page that nobody sees lets it go: a browser has six connections to a host for all its tabs.

const FIRST_MS = 500;
const MOST_MS = 30_000;
const SILENT_MS = 25_000; // the controller says something every 15 s at the least
const UNSEEN_MS = 3_000;

/** Calls told.whole(frame), told.delta(frame), told.live(), told.broken(retryMs). */
export function follow(told) {
  let waitMs = FIRST_MS;
  let heardMs = Date.now();
  let source = null;
  let timer = 0;
  let leaving = 0;

  function open() {
    clearTimeout(timer);
    source?.close();
    source = new EventSource("events");
    heardMs = Date.now();
    source.addEventListener("whole", (event) => {
      waitMs = FIRST_MS;
      take(event, told.whole);
      told.live();
    });
    source.addEventListener("delta", (event) => take(event, told.delta));
    source.addEventListener("error", again);
  }

  function take(event, use) {
    heardMs = Date.now();
    use(JSON.parse(event.data));
  }

  // The browser's own reconnecting has no back-off, so each connection is ended at its first fault.
  function again() {
    source.close();
    clearTimeout(timer);
    const jitteredMs = waitMs * (0.75 + 0.5 * Math.random());
    told.broken(jitteredMs);
    timer = setTimeout(open, jitteredMs);
    waitMs = Math.min(MOST_MS, 2 * waitMs);
  }

  function rest() {
    clearTimeout(timer);
    source.close();
  }

  const isResting = () => source.readyState === EventSource.CLOSED;

  function seen() {
    clearTimeout(leaving);
    if (document.hidden) leaving = setTimeout(rest, UNSEEN_MS);
    else if (isResting()) open();
  }

  function begin() {
    open();
    seen();
  }

  setInterval(() => {
    if (!isResting() && Date.now() - heardMs > SILENT_MS) again();
  }, 5_000);
  window.addEventListener("online", () => { if (isResting() && !document.hidden) open(); });
  document.addEventListener("visibilitychange", seen);
  // A page that was left may be kept to come back to, with all its connections.
  window.addEventListener("pagehide", rest);
  window.addEventListener("pageshow", (event) => { if (event.persisted) begin(); });
  begin();
}
