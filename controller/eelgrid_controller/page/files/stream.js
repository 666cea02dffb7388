// The stream of frames: opens it, tells when it is broken, and opens it again with back-off.

const FIRST_MS = 500;
const MOST_MS = 30_000;
const SILENT_MS = 25_000; // the controller says something every 15 s at the least

/** Calls told.whole(frame), told.delta(frame), told.live(), told.broken(retryMs). */
export function follow(told) {
  let waitMs = FIRST_MS;
  let heardMs = Date.now();
  let source = null;
  let timer = 0;

  function open() {
    clearTimeout(timer);
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

  setInterval(() => {
    if (source.readyState !== EventSource.CLOSED && Date.now() - heardMs > SILENT_MS) again();
  }, 5_000);
  window.addEventListener("online", () => { if (source.readyState === EventSource.CLOSED) open(); });
  open();
}
