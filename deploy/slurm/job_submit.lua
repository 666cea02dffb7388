-- Holds jobs that opted in for Eelgrid's controller, which decides on which nodes they start and releases them.
--
-- Install as job_submit.lua in the folder of slurm.conf, with JobSubmitPlugins=lua in slurm.conf. A site with a script of
-- its own copies eelgrid_hold and calls it from its slurm_job_submit.
--
-- Owns: who opts in, and the mark that says so (the administrator's comment; users cannot write it). A job is held only
-- while the controller renews its lease; without a controller Slurm works as if this script were not there. It runs under
-- slurmctld's locks: for each job that opts in one small file is read and another one touched, and nothing else.

-- A job opts in by --comment=eelgrid (alone or among words), or by its partition or QOS, if listed here.
local PARTITIONS = {}
local QOS = {}
local LEASE = os.getenv("EELGRID_SLURM_LEASE") or "/run/eelgrid/slurm-lease"

local function opts_in(job)
   for word in string.gmatch(job.comment or "", "[%w_-]+") do
      if word == "eelgrid" then return true end
      if word == "no-eelgrid" then return false end
   end
   return PARTITIONS[job.partition or ""] or QOS[job.qos or ""] or false
end

-- Whether the controller said in time that it is there: the file holds the second until which that is good.
local function has_controller()
   local file = io.open(LEASE, "r")
   if file == nil then return false end
   local until_s = tonumber(file:read(20) or "")
   file:close()
   return until_s ~= nil and os.time() < until_s
end

-- Says that there is a job to look at, by the time of a file. Where slurmctld may not write it, or the controller runs on
-- another host, the job waits for the next look.
local function tell_controller()
   local file = io.open(LEASE .. ".submitted", "w")
   if file == nil then return end
   file:write(os.time(), "\n")
   file:close()
end

function eelgrid_hold(job)
   if not opts_in(job) or not has_controller() then return end
   -- A job that its user holds, too, stays the user's to release.
   if job.priority == 0 then return end
   job.priority = 0
   job.admin_comment = "eelgrid:held"
   tell_controller()
end

function slurm_job_submit(job, partitions, uid)
   eelgrid_hold(job)
   return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
   return slurm.SUCCESS
end

return slurm.SUCCESS
