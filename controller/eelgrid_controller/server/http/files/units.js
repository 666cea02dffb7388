// One unit for all numbers of a column, by the largest of them. Each of these takes the column's values and gives what
// writes one of them.

const decimals = (value, digits) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const largest = (values) => values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);

/** A number that rounds to 0 without being 0 is written as less than the last digit. */
function written(value, digits, unit) {
  const least = 10 ** -digits;
  const text = value > 0 && value < least / 2 ? `<${decimals(least, digits)}` : decimals(value, digits);
  return `${text.replace(/^-(?=[0.]*$)/, "")} ${unit}`;
}

/** Of watts: W, from 10 kW on kW, from 10 MW on MW. */
export function powerUnit(values) {
  const most = largest(values);
  const [size, unit, digits] = most >= 1e7 ? [1e6, "MW", 2] : most >= 1e4 ? [1e3, "kW", most >= 1e5 ? 1 : 2] : [1, "W", 0];
  return (powerW) => written(powerW / size, digits, unit);
}

/** Of seconds: ms, from 10 s on s. */
export function latencyUnit(values) {
  const isLong = largest(values) >= 10;
  return (latencyS) => (isLong ? `${Number(latencyS.toPrecision(3))} s` : `${Number((1000 * latencyS).toPrecision(3))} ms`);
}

/** Of joules: always kWh, as prices and bills are. */
export function energyUnit(values) {
  const most = largest(values) / 3.6e6;
  const digits = most < 1 ? 3 : most < 100 ? 2 : most < 10_000 ? 1 : 0;
  return (energyJ) => written(energyJ / 3.6e6, digits, "kWh");
}

/** Of money, to the cent. */
export const moneyUnit = (currency) => () => (cost) => written(cost, 2, currency);

/** Of thousandths of a GPU. */
export const gpuUnit = () => (milli) => (Math.round(milli) / 1000).toLocaleString("en");

/** One value with its unit; a dash where it is not known. */
export const one = (unit, value) => (value == null ? "-" : unit([value])(value));
